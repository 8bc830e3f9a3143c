"""`named_jit` and `fsdp`: compile functions of named arrays."""
