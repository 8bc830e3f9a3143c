"""Tests of what the TPU compiler makes of programs, on machines without a TPU. They need `libtpu`."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("libtpu") is None:
    raise pytest.UsageError("these tests need the TPU compiler: run `make test-tpu`, or `pip install libtpu`")

# Read when libtpu is loaded: it must look for no TPU, and run in several processes at once.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
