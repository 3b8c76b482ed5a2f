"""The wording of each environment: prompts as plain strings, rendered into tokens elsewhere."""
