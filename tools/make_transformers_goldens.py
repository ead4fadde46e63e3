"""Write tests/golden/transformers/*: what `transformers` computes from the tests' tiny models, a truth that is not ours.

    python -m tools.make_transformers_goldens

It needs the extra `parity`; the tests that read the files do not. On Linux the package index's torch brings gigabytes of CUDA
libraries and does not import without them: take a CPU build (a version ending in "+cpu") where one is to be had, first.

`transformers` reads the very GGUF file that we import, by its own reader: weights, their codes and their order are judged too.
What that reader leaves out is said in `Judged.config`. Everything runs in float32, attention in its plain ("eager") form.

A file holds: `ids`, teacher-forced; `rows` and the `logits` of those; `greedy`, what `generate` makes of the first `PROMPT`
ids without sampling; `rope_factors` where the model has some; `made_with`, versions as JSON.

beams.json holds what `generate` finds by beam search, as `BEAM_SEARCHES` ask for it, with the logits disturbed by as much as two
programs may differ several times and the same found each time. `--beams` writes that file alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tools.tiny_model import SMALLEST_VOCAB, write_tiny_gguf

FOLDER = Path(__file__).parent.parent / "tests" / "golden" / "transformers"
LENGTH = 200
"""ids: more than three of the longest window"""
STEP = 7
"""of so many rows one is kept: no divisor or multiple of tiles and chunks"""
PROMPT, GENERATED = 40, 32
SMALLEST_MARGIN = 5e-3
"""between the two largest logits of a greedy step: five times as much as the tests let two programs differ by"""
NOISE, DISTURBED = 1e-3, 12
"""largest difference of a disturbed logit, and how many times a beam search must find the same in spite of it"""
PACKAGES = ("transformers", "torch", "gguf", "numpy")


@dataclass(frozen=True)
class Judged:
    """A tiny model: how `write_tiny_gguf` makes it, and what of its config `transformers`' GGUF reader does not know."""

    options: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path, rope_factors: np.ndarray | None = None) -> Path:
        """Write the GGUF file; `rope_factors` are those of the golden file, where it has some."""
        return write_tiny_gguf(path, vocab=SMALLEST_VOCAB, rope_factors=rope_factors, **self.options)


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": Judged({"seed": 21, "layers": 4}),
    "llama_linear_rope": Judged(
        {
            "seed": 22,
            "layers": 3,
            "hidden": 96,
            "heads": 6,
            "kv_heads": 1,
            "head_dim": 32,
            "tied": False,
            "matrix_type": "Q8_0",
            "metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        },
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama_llama3_rope": Judged(
        {"seed": 23, "layers": 3, "heads": 4, "kv_heads": 4, "head_dim": 32, "tied": False, "matrix_type": "Q4_0"},
        {"rope_parameters": _LLAMA3_ROPE},
    ),
    "gemma3": Judged(
        {
            "architecture": "gemma3",
            "seed": 24,
            "layers": 7,  # the sixth is global
            "kv_heads": 1,
            "head_dim": 32,
            "rope_base": 1e6,
            "metadata": {
                "gemma3.attention.sliding_window": 48,
                "gemma3.rope.scaling.type": "linear",
                "gemma3.rope.scaling.factor": 8.0,
            },
        },
        {
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}


@dataclass(frozen=True)
class BeamSearch:
    """A search, all of whose beams are results. It begins with `prompt` ids; with `ends`, these ids end an answer."""

    model: str
    prompt: int
    beams: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    ends: tuple[int, ...] = ()


BEAM_SEARCHES = (
    BeamSearch("llama", 20, 4, 20, 1.0, False, ()),
    BeamSearch("llama", 20, 4, 20, 1.0, False, (120,)),
    BeamSearch("llama", 35, 4, 20, 1.0, True, (86, 244)),
    BeamSearch("llama", 50, 3, 20, 0.0, True, (98, 228)),
    BeamSearch("llama", 65, 3, 24, 2.0, False, (119, 166)),
    BeamSearch("llama", 80, 5, 16, -1.0, False, (74, 99)),
    BeamSearch("llama_linear_rope", 66, 3, 20, 1.0, True, (68, 96)),
    BeamSearch("llama_llama3_rope", 60, 3, 30, 1.0, False, (90, 191)),
    BeamSearch("gemma3", 45, 4, 24, 1.0, False, ()),
    BeamSearch("gemma3", 61, 4, 24, 0.5, False, (87,)),
    BeamSearch("gemma3", 60, 2, 24, 1.0, True, (131,)),
)


def main() -> None:
    import torch

    torch.set_num_threads(1)  # so that sums are taken in one order
    FOLDER.mkdir(exist_ok=True)
    made_with = json.dumps({package: version(package) for package in PACKAGES})
    write_beams(made_with)
    if "--beams" in sys.argv:
        return
    for name, judged in MODELS.items():
        golden = judge(judged)
        np.savez_compressed(FOLDER / f"{name}.npz", **golden, made_with=made_with)
        print(f"{name}: logits {golden['logits'].shape}, {(FOLDER / f'{name}.npz').stat().st_size} bytes")


def judge(judged: Judged) -> dict[str, Any]:
    """The arrays of one golden file."""
    import torch

    ids = np.random.Generator(np.random.PCG64(judged.options["seed"])).integers(3, SMALLEST_VOCAB, LENGTH)
    rows = np.arange(LENGTH - 1, -1, -STEP)[::-1]
    with tempfile.TemporaryDirectory() as folder:
        model = load(judged.write(Path(folder) / "tiny.gguf"), judged.config)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    golden = {"ids": ids.astype(np.int16), "rows": rows.astype(np.int16), "logits": logits[rows]}
    golden["greedy"] = greedy(model, ids[:PROMPT]).astype(np.int16)
    if judged.config.get("rope_parameters", {}).get("rope_type") == "llama3":
        golden["rope_factors"] = rope_factors(model)
    return golden


def load(path: Path, config: Mapping[str, Any]) -> Any:
    """The file as a model of `transformers`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    file = {
        "pretrained_model_name_or_path": path.parent,
        "gguf_file": str(path),
    }  # whole: a bare name is also looked for here
    settings = AutoConfig.from_pretrained(**file)
    for name, value in config.items():
        setattr(settings, name, value)
    model, report = AutoModelForCausalLM.from_pretrained(
        **file, config=settings, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(report.values()):
        raise SystemExit(f"not every weight found its place: {report}")
    return model.eval()


def greedy(model: Any, prompt: np.ndarray) -> np.ndarray:
    """`GENERATED` ids, each the most probable one, none of them an end."""
    import torch

    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=GENERATED,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = np.sort(torch.cat(output.logits).numpy(), axis=1)[:, -2:]
    margin = float((best[:, 1] - best[:, 0]).min())
    if margin < SMALLEST_MARGIN:
        raise SystemExit(f"two logits are as near as {margin}: take another seed")
    ids: np.ndarray = output.sequences[0, len(prompt) :].numpy()
    return ids


def write_beams(made_with: str) -> None:
    """Write what `BEAM_SEARCHES` find: for each of them the beams, best first, as ids after the prompt and score."""
    found = []
    for search in BEAM_SEARCHES:
        judged = MODELS[search.model]
        with tempfile.TemporaryDirectory() as folder:
            model = load(judged.write(Path(folder) / "tiny.gguf"), judged.config)
        prompt = np.random.Generator(np.random.PCG64(search.prompt)).integers(3, SMALLEST_VOCAB, search.prompt)
        beams = search_beams(model, prompt, search, None)
        for seed in range(DISTURBED):
            others = search_beams(model, prompt, search, np.random.Generator(np.random.PCG64(seed)))
            if [ids for ids, _ in others] != [ids for ids, _ in beams]:
                raise SystemExit(f"{search} is undecided: take another prompt")
        found.append({"prompt": prompt.tolist(), "beams": beams})
        print(f"{search}: {[(len(ids), round(score, 4)) for ids, score in beams]}")
    text = json.dumps({"made_with": json.loads(made_with), "found": found}, separators=(",", ":"))
    (FOLDER / "beams.json").write_text(text + "\n", "ascii")


def search_beams(
    model: Any, prompt: np.ndarray, search: BeamSearch, random: np.random.Generator | None
) -> list[tuple[list[int], float]]:
    """What `generate` finds, with noise from `random` on each logit."""
    import torch

    def disturb(_ids: Any, scores: Any) -> Any:
        return (
            scores if random is None else scores + torch.from_numpy(random.uniform(-NOISE, NOISE, scores.shape)).float()
        )

    model.generation_config.eos_token_id = list(search.ends) or None
    output = model.generate(
        torch.from_numpy(prompt)[None],
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=search.beams,
        num_return_sequences=search.beams,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_new_tokens=search.max_tokens,
        pad_token_id=0,
        logits_processor=[disturb],
        output_scores=True,
        return_dict_in_generate=True,
    )
    answers = output.sequences[:, len(prompt) :].tolist()
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    scores = output.sequences_scores.tolist()
    return [(ids[:length], score) for ids, length, score in zip(answers, lengths, scores, strict=True)]


def rope_factors(model: Any) -> np.ndarray:
    """What GGUF's rope_freqs.weight holds for llama3's rope scaling: how many times slower each frequency turns than without."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    plain, _ = LlamaRotaryEmbedding.compute_default_rope_parameters(model.config)
    factors: np.ndarray = (plain / model.model.rotary_emb.inv_freq).numpy()
    return factors


if __name__ == "__main__":
    main()
