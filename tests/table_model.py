"""A model that transformers and sessions use like any other, and that reads its logits from tables.

Sessions, commands and screens do not care how logits come about, and a row of a table costs a tenth of the forward pass
of a tiny Llama. Layers, engines and their caches are tested with real models.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TableConfig(PreTrainedConfig):
    """The fields that a cache and an estimate of its memory read."""

    model_type = "table"
    __getattribute__ = object.__getattribute__  # sessions read it often, and no attribute has another name

    def __init__(
        self, vocab_size: int = 64, max_position_embeddings: int = 256, reads_all: bool = False, **fields: Any
    ) -> None:
        self.vocab_size, self.max_position_embeddings, self.reads_all = vocab_size, max_position_embeddings, reads_all
        self.num_hidden_layers = self.num_attention_heads = self.hidden_size = 1
        super().__init__(**{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None} | fields)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "TableConfig":
        """Itself, at once. Sessions read it often."""
        return self


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits of the next token: a row for the last token, one for the token before it and, with `reads_all`, one for
    the sum of the whole text.

    The cache holds the text as keys, so a wrong rewind changes the logits. Their bits do not depend on the verify
    width. Some tokens are likely after every other, as in a language, so drafts are sometimes accepted.
    """

    config_class = TableConfig
    config: TableConfig

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        size = config.vocab_size
        common = torch.randn(size, generator=torch.Generator().manual_seed(0))
        self.last = nn.Embedding(size, size, _weight=torch.randn(size, size) + 0.8 * common)
        self.before = nn.Embedding(size, size, _weight=torch.randn(size, size) / 2)
        self.all = nn.Embedding(size, size, _weight=torch.randn(size, size)) if config.reads_all else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """They are random already."""

    def get_input_embeddings(self) -> nn.Embedding:
        return self.last

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **arguments: Any,
    ) -> CausalLMOutputWithPast:
        ids = input_ids
        if use_cache:
            past_key_values = DynamicCache(config=self.config) if past_key_values is None else past_key_values
            text = input_ids[:, None, :, None]  # (B, 1, T, 1), keys of one head with one value
            ids = past_key_values.update(text, text, 0)[0][:, 0, :, 0]
        rows, end = min(logits_to_keep or input_ids.shape[1], input_ids.shape[1]), ids.shape[1]
        # The first token has none before it, and counts twice.
        before = ids[:, end - rows - 1 : -1] if rows < end else torch.cat([ids[:, :1], ids[:, :-1]], dim=1)
        logits = embedding(ids[:, -rows:], self.last.weight) + embedding(before, self.before.weight)
        if self.all is not None:
            sums = ids.cumsum(1)[:, -rows:] % self.config.vocab_size
            logits = logits + embedding(sums, self.all.weight)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values if use_cache else None)
