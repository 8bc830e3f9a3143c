# ruff: noqa: E402  (the environment must be set before JAX is imported)
"""Eight virtual CPU devices, runtime type checks on the whole package, and reproducible property tests."""

import os

FLAG = "--xla_force_host_platform_device_count"
os.environ["XLA_FLAGS"] = " ".join(
    [*(f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(FLAG)), f"{FLAG}=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis
import jax
import jaxtyping
import pytest

# Must come before the first import of the package, which test modules do.
jaxtyping.install_import_hook("namedshard", "beartype.beartype")

# Needs the TPU compiler: `make test-tpu` names this folder.
collect_ignore = ["tpu"]

if jax.device_count() != 8:
    raise pytest.UsageError(f"these tests need 8 virtual devices, and JAX has {jax.device_count()}")

hypothesis.settings.register_profile("namedshard", derandomize=True, deadline=None, database=None, max_examples=40)
hypothesis.settings.load_profile("namedshard")


def pytest_configure(config: pytest.Config) -> None:
    """Arrays that carry a mapping inherit a constructor from Haliax, whose annotations the type checker finds dated."""
    config.addinivalue_line("filterwarnings", "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")
