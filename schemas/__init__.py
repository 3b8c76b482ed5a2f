"""What is on disk, and what may go wrong: tables, configuration, run directory, manifests, errors.

Nothing in this package imports torch, transformers, deepspeed or vllm.
"""

__version__ = "0.1.0"
