"""Axis names to placements: shard, compile and load JAX models with named axes.

See https://github.com/namedshard/namedshard for the documentation.
"""

from namedshard._errors import AmbiguousMeshError as AmbiguousMeshError
from namedshard._mapping import AxisMapping as AxisMapping
from namedshard._mapping import axis_mapping as axis_mapping
from namedshard._mapping import carried_mapping as carried_mapping
from namedshard._mapping import first as first
from namedshard._mapping import with_mapping as with_mapping
from namedshard._place import auto_sharded as auto_sharded
from namedshard._place import shard as shard
from namedshard._plan import Plan as Plan
from namedshard._plan import plan as plan
