"""Axis names to placements: shard, compile and load JAX models with named axes.

See https://github.com/namedshard/namedshard for the documentation.
"""

from namedshard._errors import AmbiguousMeshError as AmbiguousMeshError
from namedshard._errors import CheckpointError as CheckpointError
from namedshard._errors import DeletedArrayError as DeletedArrayError
from namedshard._errors import DonationError as DonationError
from namedshard._errors import HeaderError as HeaderError
from namedshard._errors import IgnoredTransferError as IgnoredTransferError
from namedshard._errors import IndivisibleAxisError as IndivisibleAxisError
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
from namedshard._errors import PlaceError as PlaceError
from namedshard._errors import PlanError as PlanError
from namedshard._errors import StaticArgumentError as StaticArgumentError
from namedshard._errors import TracedMoveError as TracedMoveError
from namedshard._explain import Explanation as Explanation
from namedshard._explain import explain as explain
from namedshard._fsdp import fsdp as fsdp
from namedshard._jit import NamedJit as NamedJit
from namedshard._jit import Report as Report
from namedshard._jit import named_jit as named_jit
from namedshard._mapping import AxisMapping as AxisMapping
from namedshard._mapping import axis_mapping as axis_mapping
from namedshard._mapping import carried_mapping as carried_mapping
from namedshard._mapping import first as first
from namedshard._mapping import with_mapping as with_mapping
from namedshard._place import auto_sharded as auto_sharded
from namedshard._place import shard as shard
from namedshard._plan import AxisChoice as AxisChoice
from namedshard._plan import LeafPlan as LeafPlan
from namedshard._plan import Plan as Plan
from namedshard._plan import plan as plan
from namedshard._route import Route as Route
from namedshard._specs import physical_axis_size as physical_axis_size
from namedshard._specs import pspec_for as pspec_for
from namedshard._specs import round_axis_for_partitioning as round_axis_for_partitioning
from namedshard._specs import sharding_for as sharding_for
