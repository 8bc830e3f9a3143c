"""Tests of what the TPU compiler makes of programs, on machines without a TPU. They need `libtpu`."""

import importlib.util

import pytest

if importlib.util.find_spec("libtpu") is None:
    raise pytest.UsageError("these tests need the TPU compiler: run `make test-tpu`, or `pip install libtpu`")
