"""EFFECTS. Coordinates the processes of a job through the key-value store of ``jax.distributed``."""
