"""`load_safetensors`: from bytes to the final placement in one step."""

import collections
import concurrent.futures
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxtyping import PyTree

from namedshard import _moves as moves
from namedshard._best_effort import best_effort_spec
from namedshard._errors import MissingTensorError, NarrowingError, NoMeshError, did_you_mean, message
from namedshard._leaves import Leaf, is_array_like, named_leaves
from namedshard._mapping import AxisMapping, MappingLike, resolve_mapping, thread_hint
from namedshard._mesh import MeshLike, manual_axes, resolve_mesh
from namedshard._place import check_memory_kind
from namedshard._plan import plan_leaves
from namedshard._safetensors._header import TensorInfo
from namedshard._safetensors._index import find_tensors
from namedshard._safetensors._layout import Bounds, Part, boxes_in, leaf_view
from namedshard._safetensors._names import Names, Tensor, tensors_of
from namedshard._safetensors._ranges import Chunk, chunks, joined, run_offsets
from namedshard._safetensors._source import Opener, Source, open_source
