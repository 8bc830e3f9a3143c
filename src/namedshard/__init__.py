"""Axis names to placements: shard, compile and load JAX models with named axes."""

from namedshard import testing as testing
from namedshard._errors import AmbiguousMeshError as AmbiguousMeshError
from namedshard._errors import CheckpointError as CheckpointError
from namedshard._errors import DeletedArrayError as DeletedArrayError
from namedshard._errors import DonationError as DonationError
from namedshard._errors import ExchangeError as ExchangeError
from namedshard._errors import HeaderError as HeaderError
from namedshard._errors import HostValueError as HostValueError
from namedshard._errors import IgnoredTransferError as IgnoredTransferError
from namedshard._errors import IndivisibleAxisError as IndivisibleAxisError
from namedshard._errors import LocalArrayError as LocalArrayError
from namedshard._errors import MappingError as MappingError
from namedshard._errors import MemoryKindError as MemoryKindError
from namedshard._errors import MeshAxisConflictError as MeshAxisConflictError
from namedshard._errors import MeshAxisNotFoundError as MeshAxisNotFoundError
from namedshard._errors import MismatchError as MismatchError
from namedshard._errors import MissingTensorError as MissingTensorError
from namedshard._errors import MixedAxesError as MixedAxesError
from namedshard._errors import NamedShardError as NamedShardError
from namedshard._errors import NarrowingError as NarrowingError
from namedshard._errors import NoCandidateError as NoCandidateError
from namedshard._errors import NoMappingError as NoMappingError
from namedshard._errors import NoMeshError as NoMeshError
from namedshard._errors import OffloadError as OffloadError
from namedshard._errors import OutOfStepError as OutOfStepError
from namedshard._errors import PlaceError as PlaceError
from namedshard._errors import PlanError as PlanError
from namedshard._errors import SettingError as SettingError
from namedshard._errors import StaticArgumentError as StaticArgumentError
from namedshard._errors import TracedMoveError as TracedMoveError
from namedshard._errors import UnsupportedArrayError as UnsupportedArrayError
from namedshard._explain.explain import explain as explain
from namedshard._explain.report import Explanation as Explanation
from namedshard._explain.report import Lint as Lint
from namedshard._explain.report import Row as Row
from namedshard._explain.report import Totals as Totals
from namedshard._init.init import CompiledInit as CompiledInit
from namedshard._init.init import InitReport as InitReport
from namedshard._init.init import LoweredInit as LoweredInit
from namedshard._init.init import init as init
from namedshard._init.init import lower_init as lower_init
from namedshard._init.run import ProgramReport as ProgramReport
from namedshard._jit.named_jit import NamedJit as NamedJit
from namedshard._jit.named_jit import fsdp as fsdp
from namedshard._jit.named_jit import named_jit as named_jit
from namedshard._jit.store import Report as Report
from namedshard._offload.offload import offload as offload
from namedshard._offload.offload import offload_optimizer as offload_optimizer
from namedshard._place.gather import iter_to_host as iter_to_host
from namedshard._place.gather import to_host as to_host
from namedshard._place.route import Route as Route
from namedshard._place.shard import auto_sharded as auto_sharded
from namedshard._place.shard import shard as shard
from namedshard._plan.best_effort import best_effort_sharding as best_effort_sharding
from namedshard._plan.mapping import AxisMapping as AxisMapping
from namedshard._plan.mapping import axis_mapping as axis_mapping
from namedshard._plan.mapping import carried_mapping as carried_mapping
from namedshard._plan.mapping import first as first
from namedshard._plan.mapping import with_mapping as with_mapping
from namedshard._plan.plan import AxisChoice as AxisChoice
from namedshard._plan.plan import LeafPlan as LeafPlan
from namedshard._plan.plan import Plan as Plan
from namedshard._plan.plan import plan as plan
from namedshard._plan.specs import physical_axis_size as physical_axis_size
from namedshard._plan.specs import pspec_for as pspec_for
from namedshard._plan.specs import round_axis_for_partitioning as round_axis_for_partitioning
from namedshard._plan.specs import sharding_for as sharding_for
from namedshard._processes.agreement import collective_timeout as collective_timeout
from namedshard._safetensors.header import TensorInfo as TensorInfo
from namedshard._safetensors.index import read_header as read_header
from namedshard._safetensors.load import load_safetensors as load_safetensors
from namedshard._safetensors.save import save_safetensors as save_safetensors

__all__ = [
    "AmbiguousMeshError",
    "AxisChoice",
    "AxisMapping",
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
    "Totals",
    "TracedMoveError",
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
    "round_axis_for_partitioning",
    "save_safetensors",
    "shard",
    "sharding_for",
    "testing",
    "to_host",
    "with_mapping",
]
