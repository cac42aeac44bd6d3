"""Loads an EAGLE-3 or DSpark drafter with the package speculators and writes the logits that it computes.

    PYTHONPATH=PACKAGES python tests/speculators_reader.py FOLDER RUN

The packages are those of tests/speculators_oracle.py. RUN is a safetensors file of that program's layout: features and
tokens. The logits are added to it. The embedding is the verifier's, which the config names.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators_block_oracle import run_of
from speculators_oracle import Unused, logits_of


def main(folder: Path, run: Path) -> None:
    from speculators import SpeculatorModel
    from speculators.models import dspark, eagle3

    kind = json.loads((folder / "config.json").read_text())["speculators_model_type"]
    classes = {"eagle3": eagle3.Eagle3SpeculatorConfig, "dspark": dspark.DSparkSpeculatorConfig}
    config = classes[kind].from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    assert type(model) in (eagle3.Eagle3DraftModel, dspark.DSparkDraftModel)
    assert all(part.isfinite().all() for part in model.state_dict().values()), "a weight was missing in the folder"
    tensors = load_file(run)
    given = tensors["features"], tensors["tokens"]
    with torch.no_grad():
        logits = logits_of(model, *given) if kind == "eagle3" else run_of(kind, model, *given)["logits"]
    save_file({name: tensors[name] for name in ("features", "tokens")} | {"logits": logits}, run)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.meta_path.append(Unused())
    main(Path(sys.argv[1]), Path(sys.argv[2]))
