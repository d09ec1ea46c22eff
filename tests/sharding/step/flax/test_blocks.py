"""Stage 3 with models as they are: modules found by class or path gather their own parameters."""

import jax
import pytest
from flax import linen as nn

import sharding as shd

from . import test_frameworks as frameworks

pytestmark = pytest.mark.usefixtures("x64")


class Nested(nn.Module):
    """A block in a block; both are found."""

    @nn.compact
    def __call__(self, x, train=False, *, scale=1.0):
        return frameworks.Block(name="inner_block")(x, train, scale=scale)


def run(zero, block, scan):
    lm = frameworks.LM(block, scan)
    return frameworks.train(
        zero, frameworks.linen_state(lm, frameworks.ADAMW), frameworks.linen_loss(lm)
    )


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(
    ("patterns", "block", "scan"),
    [
        ("Block", frameworks.Block, False),
        (r"^Block_\d$", frameworks.Block, False),
        (("SetupBlock", "Embed"), frameworks.SetupBlock, False),
        ("^blocks$", frameworks.Block, True),
        ("Block", Nested, False),
        (("Nested", "inner_block"), Nested, False),
    ],
)
def test_blocks_of_an_unmodified_model(patterns, block, scan):
    state, metrics = run(frameworks.zero_of(gathered_blocks=patterns), block, scan)
    reference, losses = frameworks.linen_reference(block, scan, frameworks.ADAMW)
    frameworks.assert_same(state, reference, metrics, losses)
    assert frameworks.bytes_held(state.params) < 0.2


@pytest.mark.parametrize("reshard", [True, False])
def test_they_are_the_blocks_of_a_model_that_takes_them(reshard):
    """The same collectives, and temporaries within 1 %."""

    def compiled(zero, block):
        lm = frameworks.LM(block)
        state = zero.init(frameworks.linen_state(lm, frameworks.ADAMW))
        step = zero.train_step(frameworks.linen_loss(lm))
        return step.lower(state, frameworks.batch(0)).compile()

    plain = frameworks.zero_of(reshard_after_forward=reshard)
    found = frameworks.zero_of(reshard_after_forward=reshard, gathered_blocks="Block")
    one, two = compiled(plain, plain.gathered(frameworks.Block)), compiled(found, frameworks.Block)
    assert shd.wire_bytes(one) == shd.wire_bytes(two)
    sizes = [x.memory_analysis().temp_size_in_bytes for x in (one, two)]
    assert abs(sizes[0] - sizes[1]) < 0.01 * sizes[0]


def test_blocks_that_are_not_there_raise():
    message = r"'Decoder' is neither .* It calls LM \(the model\), Embed \(Embed_0\), Block"
    with pytest.raises(ValueError, match=message):
        run(frameworks.zero_of(gathered_blocks=("Block", "Decoder")), frameworks.Block, False)


def test_below_stage_3_there_is_nothing_to_gather():
    state, _ = run(frameworks.zero_of(2, gathered_blocks="Decoder"), frameworks.Block, False)
    assert jax.tree.leaves(state.params)[0].sharding.is_fully_replicated
