"""The checkpoints that are compared: tiny ones of different seeds, shapes and temperaments."""

from dataclasses import dataclass
from pathlib import Path

from adapter.random_model import TINY, ModelShape, write_random_model


@dataclass(frozen=True)
class Recipe:
    """A demo checkpoint whose output layer is multiplied by `logit_gain`: above 1, the answers are
    peaked and near ties are rare."""

    seed: int
    shape: ModelShape
    logit_gain: float = 1.0


RECIPES = {
    "tiny": Recipe(0, TINY, logit_gain=2.0),
    "wide": Recipe(
        1,
        ModelShape(
            encoder_layers=3,
            encoder_hidden_size=96,
            encoder_heads=3,
            num_layers=3,
            hidden_size=192,
            num_heads=3,
            num_kv_heads=1,
            intermediate_size=320,
        ),
        logit_gain=4.0,
    ),
    "peaked": Recipe(
        2,
        ModelShape(
            encoder_layers=1,
            encoder_hidden_size=128,
            encoder_heads=2,
            num_layers=4,
            hidden_size=96,
            num_heads=3,
            num_kv_heads=3,
            intermediate_size=192,
        ),
        logit_gain=4.0,
    ),
}


def write_checkpoint(name: str, directory: Path) -> Path:
    """Write the checkpoint of a recipe and return its directory."""
    recipe = RECIPES[name]
    write_random_model(directory, seed=recipe.seed, shape=recipe.shape)
    strengthen_logits(directory / "model.safetensors", recipe.logit_gain)
    return directory


def strengthen_logits(path: Path, gain: float) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    (name,) = (name for name in weights if "lm_head" in name)
    weights[name] = weights[name] * gain
    save_file(weights, path, metadata={"format": "pt"})
