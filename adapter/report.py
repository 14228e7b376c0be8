"""A report about a song: its sections are presets, each answered by itself."""

from collections.abc import Mapping, Sequence
from typing import Any

from adapter import schemas
from adapter.errors import AdapterError
from adapter.presets import Preset, built_in_presets
from adapter.settings import Settings


class Report:
    """What one request asks for: the presets of its sections, in order, and their prompts."""

    def __init__(self, request: schemas.FullReportRequest, settings: Settings) -> None:
        known = {preset.name: preset for preset in settings.presets or built_in_presets()}
        names = request.sections or list(known)
        self.presets = [known[name] for name in names]
        self.prompts = [
            _prompt(preset, None if request.seed is None else request.seed + index, settings)
            for index, preset in enumerate(self.presets)
        ]

    def section(self, index: int, answer: schemas.Answer, *, disputed: bool) -> schemas.Section:
        """The answer to the preset at this index, as a section."""
        preset = self.presets[index]
        return schemas.Section(
            **dict(answer),
            report_key=preset.report_key,
            preset=preset.name,
            disputed_by_measurement=disputed,
        )

    def content(
        self, sections: Sequence[schemas.Section], measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What stands under each key of the report."""
        contents = {
            section.report_key: _content(section, preset)
            for section, preset in zip(sections, self.presets, strict=True)
        }
        return contents | {"measured": measured}


def error_content(error: AdapterError | schemas.ErrorBody) -> dict[str, Any]:
    """What stands in the place of what could not be made."""
    return {"error": {"code": error.code, "message": error.message, "field": error.field}}


def _prompt(preset: Preset, seed: int | None, settings: Settings) -> schemas.PromptFields:
    fields = preset.fields() | {"preset": preset.name, "seed": seed}
    fields["max_new_tokens"] = min(preset.max_new_tokens, settings.max_new_tokens)
    return schemas.PromptFields(**fields)


def _content(section: schemas.Section, preset: Preset) -> Any:
    if section.error is not None:
        return error_content(section.error)
    return section.response if preset.json_schema is None else section.data
