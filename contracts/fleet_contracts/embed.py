"""Stage `decode` of a model that makes embeddings: token ids in, one vector per input out."""

from __future__ import annotations

from fleet_contracts.base import Contract


class EmbedParams(Contract, frozen=True, kw_only=True, tag="embed.v1"):
    """What to make of the inputs.

    Tensors of the step's input: `prompt` int32 [num_tokens], all inputs one after the other, and `lengths` int32
    [num_inputs], the tokens of each. Tensor of its output: `vectors` float32 [num_inputs, dimensions], in order.

    Attributes:
        dimensions: width of the vectors, 0 = the model's own.
    """

    dimensions: int = 0


class EmbedResult(Contract, frozen=True, kw_only=True, tag="embed_result.v1"):
    """What the step says besides its tensor.

    Attributes:
        num_prompt_tokens: tokens of all inputs together.
    """

    num_prompt_tokens: int
