"""Gemma 4's assistants as Google publishes them: `gemma4_assistant` and `gemma4_unified_assistant`."""

from dataclasses import dataclass, replace

import torch

from families.config import ModelConfig
from support.errors import UsageError
from support.reader import ConfigReader
from weights.head_reader import HeadReader
from weights.heads import EagleConfig, EagleFile, Table
from weights.hf import EMBEDDING, as_computed, build_model, hf_views, parameter_sources

ASSISTANTS = {f"gemma4{kind}_assistant": f"gemma4{kind}_text" for kind in ("", "_unified")}


@dataclass(frozen=True)
class AssistantConfig(EagleConfig):
    """Geometry of an assistant. `layer` is that of all its layers."""

    places: tuple[tuple[int, int], ...] = ()  # of each layer: the target's cache and the place in it that it reads
    clusters: int = 0  # of tokens; 0: every token may be drafted
    active: int = 0  # clusters of which tokens are drafted at once

    @property
    def kind(self) -> str:
        return "assistant"


def check_written(config: object) -> None:
    """Raise UsageError for an assistant, which no tool writes in another form."""
    if isinstance(config, AssistantConfig):
        raise UsageError("an assistant stays as it is published, and is rounded while it is read (--head-quant).")


class AssistantReader(HeadReader):
    """An assistant: its config in parts, its tensors under Hugging Face's names."""

    kind = "an assistant"

    def read(self) -> EagleFile:
        """The whole assistant. Raises ValueError in one line if it is damaged or made for another target."""
        read = ConfigReader(self.raw, str(self.path / "config.json"))
        text = read.config.get("text_config")
        if not isinstance(text, dict):
            raise read.error("text_config must be an object.")
        # all layers share, but keys of another model
        own = {"model_type": ASSISTANTS[read.config["model_type"]], "num_kv_shared_layers": 0, "architectures": None}
        layer = ModelConfig.from_hf(text | own, read.where)
        layer = replace(layer, shared_layers=layer.num_hidden_layers, tie_word_embeddings=False)
        if layer.num_local_experts or layer.token_inputs:
            self.fail("experts, or an embedding for each layer, are not implemented in an assistant.")
        sizes = read.integer("backbone_hidden_size"), layer.vocab_size
        if sizes != (target_sizes := (self.target.hidden_size, self.target.vocab_size)):
            self.misfit(f"made for hidden_size and vocab_size {sizes}, this model has {target_sizes}")
        clusters = read.integer("num_centroids", 2048) if read.boolean("use_ordered_embeddings", False) else 0
        active = read.integer("centroid_intermediate_top_k", 32, high=max(clusters, 1)) if clusters else 0
        if clusters and layer.vocab_size % clusters:
            self.fail(f"{clusters} clusters do not divide the vocabulary of {layer.vocab_size}.")
        places = tuple(self._place(layer, i) for i in range(layer.num_hidden_layers))
        config = AssistantConfig(
            1, layer, sizes[0], has_lm_head=True, target_vocab_size=sizes[1], places=places, clusters=clusters,
            active=active,
        )  # fmt: skip
        return EagleFile(config, self._tensors(config), self.notes)

    def _place(self, layer: ModelConfig, i: int) -> tuple[int, int]:
        """Where the target keeps what layer i reads: in the last layer of the same kind that has keys of its own."""
        target, wide = self.target, not layer.windows[i]
        for kind, (heads, layers) in enumerate(target.kv_layers.items()):
            own = [at for at in layers if (not target.windows[at]) == wide]
            if own and heads == layer.heads_of(i):
                return kind, layers.index(own[-1])
        heads, size = layer.heads_of(i)
        self.misfit(f"its layer {i} reads {heads} heads of {size}, which this model lacks")

    def _tensors(self, config: AssistantConfig) -> dict[str, torch.Tensor]:
        self.name_entries()
        c, model = config.layer, build_model(config.layer)
        self.entries = as_computed(self.entries, c)
        if EMBEDDING in self.entries:  # it embeds with the target's table
            self.entries["lm_head.weight"] = self.entries.pop(EMBEDDING)
        ordering = self.entries.pop("masked_embedding.token_ordering", None)
        H, size, views = config.target_hidden_size, c.hidden_size, hf_views(model)
        table: Table = {}
        for ours, names in parameter_sources(model, views).items():
            if names != [EMBEDDING]:
                table[f"model.{ours}"] = {name: tuple(views[name].shape) for name in names}
        table["before.weight"] = {"pre_projection.weight": (size, 2 * H)}
        table["behind.weight"] = {"post_projection.weight": (H, size)}
        if config.clusters:
            table["centroids.weight"] = {"masked_embedding.centroids.weight": (config.clusters, size)}
        tensors = self.tensors(table, {}, None)
        if config.clusters:
            if ordering is None:
                self.fail("masked_embedding.token_ordering is missing.")
            order = ordering.read().long().flatten()
            if not torch.equal(order.sort().values, torch.arange(c.vocab_size)):
                self.fail("masked_embedding.token_ordering does not name every token once.")
            clusters = torch.arange(config.clusters).repeat_interleave(c.vocab_size // config.clusters)
            tensors["cluster"] = torch.empty_like(order).index_copy_(0, order, clusters)
        return tensors
