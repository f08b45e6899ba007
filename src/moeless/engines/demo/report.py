"""What a build measured, and the manifest that keeps it beside the weights.

Knows numbers and JSON only.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from moeless.engines.demo.variants import DemoVariant
from moeless.errors import CheckpointError

MANIFEST_NAME: Final = "moeless-demo.json"

RECIPE: Final = 3
"""Version of the carving. Raised whenever a variant would get other weights: what older ones left
in a cache is built again."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A carved model held against the dense one, on conversations that the carving did not see.

    Args:
        dense_perplexity: Of the dense model.
        carved_perplexity: Of the written checkpoint.
        load_LE: Tokens routed to each expert of each layer.
        tokens: Tokens that count in the perplexities.
        text_sha256: Of the conversations.
    """

    dense_perplexity: float
    carved_perplexity: float
    load_LE: tuple[tuple[int, ...], ...]
    tokens: int
    text_sha256: str

    @property
    def perplexity_ratio(self) -> float:
        """Carved over dense: 1 would be lossless."""
        return self.carved_perplexity / self.dense_perplexity

    @property
    def load_skew_L(self) -> tuple[float, ...]:
        """Largest over mean expert load of each layer; at most experts over top-k."""
        return tuple(max(load_E) * len(load_E) / sum(load_E) for load_E in self.load_LE)

    @property
    def mean_load_skew(self) -> float:
        """Mean of the layers' load skew."""
        return sum(self.load_skew_L) / len(self.load_skew_L)

    @property
    def worst_load_skew(self) -> float:
        """Load skew of the most skewed layer."""
        return max(self.load_skew_L)

    def to_json(self) -> dict[str, Any]:
        """What was measured, with the figures derived from it."""
        return {
            **asdict(self),
            "perplexity_ratio": self.perplexity_ratio,
            "load_skew": {
                "mean": self.mean_load_skew,
                "worst": self.worst_load_skew,
                "per_layer": list(self.load_skew_L),
            },
        }


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """A built demo model, described.

    Args:
        variant: How it was carved.
        recipe: Version of the carving.
        derived: Whether it was carved here, not by the recipe that is shipped.
        source: The requirement that the dense model came from.
        measured: How close it is to the dense model; None if the build did not measure it.
        build_s: Wall time of the build in seconds, without the download.
        versions: Of the packages that took part.
        sha256: Of the wheel, the calibration texts and the files of the checkpoint.
        size_bytes: Of the files of the checkpoint.
    """

    variant: DemoVariant
    recipe: int
    derived: bool
    source: str
    measured: Measurement | None
    build_s: float
    versions: Mapping[str, str]
    sha256: Mapping[str, str]
    size_bytes: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """The manifest."""
        return {
            **asdict(self),
            "variant": {
                **asdict(self.variant),
                "name": self.variant.name,
                "expert_width": self.variant.expert_width,
                "shared_width": self.variant.shared_width,
                "active_fraction": round(self.variant.active_fraction, 4),
            },
            "measured": self.measured and self.measured.to_json(),
        }

    def write(self, directory: Path) -> None:
        """Write the manifest into a checkpoint's directory."""
        text = json.dumps(self.to_json(), indent=2) + "\n"
        (directory / MANIFEST_NAME).write_text(text, encoding="utf-8")


def read_report(directory: Path) -> DemoReport:
    """Read the manifest of a built demo model.

    Raises:
        CheckpointError: If there is none, or it is not one.
    """
    path = directory / MANIFEST_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        fields = {key: raw[key] for key in DemoReport.__dataclass_fields__}
        variant = {key: raw["variant"][key] for key in DemoVariant.__dataclass_fields__}
        fields["variant"] = DemoVariant(**variant)
        if raw["measured"] is not None:
            fields["measured"] = _read_measurement(raw["measured"])
        return DemoReport(**fields)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a manifest of the demo model ({type(error).__name__}: {error}); "
            "build it again with 'moeless demo-model build --force'"
        ) from error


def _read_measurement(raw: Mapping[str, Any]) -> Measurement:
    fields = {key: raw[key] for key in Measurement.__dataclass_fields__}
    fields["load_LE"] = tuple(tuple(load_E) for load_E in raw["load_LE"])
    return Measurement(**fields)


def is_complete(directory: Path, report: DemoReport) -> bool:
    """Whether all files that the manifest lists are there with their sizes."""
    return all(
        (directory / name).is_file() and (directory / name).stat().st_size == size
        for name, size in report.size_bytes.items()
    )
