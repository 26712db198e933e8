"""The canary of the simulator, under the name by which tests of nodes and engines know it."""

from cluster.simulator.canary import KV_BYTES as KV_BYTES
from cluster.simulator.canary import VOCAB_SIZE as VOCAB_SIZE
from cluster.simulator.canary import BlockTables as BlockTables
from cluster.simulator.canary import CanaryPipeline as CanaryPipeline
from cluster.simulator.canary import WrongBlock as WrongBlock
from cluster.simulator.canary import block_bytes as block_bytes
from cluster.simulator.canary import canary_layout as canary_layout
from cluster.simulator.canary import continuation as continuation
from cluster.simulator.canary import expected_block as expected_block
from cluster.simulator.canary import next_token as next_token
from cluster.simulator.canary import prefix_digests as prefix_digests
from cluster.simulator.canary import write_blocks as write_blocks
