"""Several machines under ``mlx.launch``: each process, a rank, holds some heads of a model.

:mod:`.ranks` is what they tell one another, :mod:`.sharded` the model. Rank 0 decides whatever
could diverge, as a token drawn or a time measured; all run the same program; the rest is refused.
"""

from kvlingo_mlx.machines.ranks import OWN_FOLDER as OWN_FOLDER
from kvlingo_mlx.machines.ranks import digest_of as digest_of
from kvlingo_mlx.machines.ranks import here as here
from kvlingo_mlx.machines.ranks import lost as lost
from kvlingo_mlx.machines.ranks import own_folder as own_folder
from kvlingo_mlx.machines.sharded import ShardedModel as ShardedModel
from kvlingo_mlx.machines.sharded import facts_of as facts_of
from kvlingo_mlx.machines.sharded import facts_of_work as facts_of_work
from kvlingo_mlx.machines.sharded import group_of as group_of
from kvlingo_mlx.machines.sharded import shard as shard
from kvlingo_mlx.machines.sharded import shard_module as shard_module
