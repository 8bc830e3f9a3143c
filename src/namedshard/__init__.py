"""Axis names to placements: shard, compile and load JAX models with named axes."""

from namedshard import testing
from namedshard._errors import (
    AmbiguousMeshError,
    AxisNamesError,
    CheckpointError,
    DeletedArrayError,
    DonationError,
    ExchangeError,
    HeaderError,
    HostValueError,
    IgnoredTransferError,
    IndivisibleAxisError,
    LocalArrayError,
    MappingError,
    MemoryKindError,
    MeshAxisConflictError,
    MeshAxisNotFoundError,
    MismatchError,
    MissingTensorError,
    MixedAxesError,
    NamedShardError,
    NarrowingError,
    NoCandidateError,
    NoMappingError,
    NoMeshError,
    OffloadError,
    OutOfStepError,
    PlaceError,
    PlanError,
    SettingError,
    StaticArgumentError,
    TopologyError,
    TracedMoveError,
    UnattachedDevicesError,
    UnsupportedArrayError,
)
from namedshard._explain.explain import explain
from namedshard._explain.report import Explanation, Lint, Row, Totals
from namedshard._init.init import CompiledInit, InitReport, LoweredInit, init, lower_init
from namedshard._init.run import ProgramReport
from namedshard._jit.named_jit import NamedJit, fsdp, named_jit
from namedshard._jit.store import Report
from namedshard._offload.offload import offload, offload_optimizer
from namedshard._place.gather import iter_to_host, to_host
from namedshard._place.route import Route
from namedshard._place.shard import auto_sharded, shard
from namedshard._plan.best_effort import best_effort_sharding
from namedshard._plan.leaves import register_axis_names
from namedshard._plan.mapping import AxisMapping, axis_mapping, carried_mapping, first, with_mapping
from namedshard._plan.plan import AxisChoice, LeafPlan, Plan, plan
from namedshard._plan.specs import physical_axis_size, pspec_for, round_axis_for_partitioning, sharding_for
from namedshard._processes.agreement import collective_timeout
from namedshard._safetensors.header import TensorInfo
from namedshard._safetensors.index import read_header
from namedshard._safetensors.load import load_safetensors
from namedshard._safetensors.save import save_safetensors
from namedshard._topology import topology_mesh

__all__ = [
    "AmbiguousMeshError",
    "AxisChoice",
    "AxisMapping",
    "AxisNamesError",
    "CheckpointError",
    "CompiledInit",
    "DeletedArrayError",
    "DonationError",
    "ExchangeError",
    "Explanation",
    "HeaderError",
    "HostValueError",
    "IgnoredTransferError",
    "IndivisibleAxisError",
    "InitReport",
    "LeafPlan",
    "Lint",
    "LocalArrayError",
    "LoweredInit",
    "MappingError",
    "MemoryKindError",
    "MeshAxisConflictError",
    "MeshAxisNotFoundError",
    "MismatchError",
    "MissingTensorError",
    "MixedAxesError",
    "NamedJit",
    "NamedShardError",
    "NarrowingError",
    "NoCandidateError",
    "NoMappingError",
    "NoMeshError",
    "OffloadError",
    "OutOfStepError",
    "PlaceError",
    "Plan",
    "PlanError",
    "ProgramReport",
    "Report",
    "Route",
    "Row",
    "SettingError",
    "StaticArgumentError",
    "TensorInfo",
    "TopologyError",
    "Totals",
    "TracedMoveError",
    "UnattachedDevicesError",
    "UnsupportedArrayError",
    "auto_sharded",
    "axis_mapping",
    "best_effort_sharding",
    "carried_mapping",
    "collective_timeout",
    "explain",
    "first",
    "fsdp",
    "init",
    "iter_to_host",
    "load_safetensors",
    "lower_init",
    "named_jit",
    "offload",
    "offload_optimizer",
    "physical_axis_size",
    "plan",
    "pspec_for",
    "read_header",
    "register_axis_names",
    "round_axis_for_partitioning",
    "save_safetensors",
    "shard",
    "sharding_for",
    "testing",
    "to_host",
    "topology_mesh",
    "with_mapping",
]
