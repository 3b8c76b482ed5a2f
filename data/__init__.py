"""Where tasks come from: environments, task panels, prompts, presets, annotations."""
