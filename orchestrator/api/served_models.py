"""The models that are served: of each its tokenizer, its settings, and how its requests are prepared.

Knows which of them a request means; not where they run. A request that names none means the only one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api.preparation import Preparer, not_served
from orchestrator.api.settings import ApiSettings
from pipelines.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ServedModel:
    tokenizer: TextTokenizer
    settings: ApiSettings
    preparer: Preparer


class ServedModels:
    def __init__(self, models: Sequence[tuple[TextTokenizer, ApiSettings]]) -> None:
        """At least one, no two of one name. Raises ConfigurationError where the settings name a parser that there is
        not."""
        names = tuple(settings.model_name for _, settings in models)
        self._models = {
            settings.model_name: ServedModel(tokenizer, settings, Preparer(tokenizer, settings, names))
            for tokenizer, settings in models
        }

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    @property
    def first(self) -> ServedModel:
        return next(iter(self._models.values()))

    def named(self, name: str) -> ServedModel:
        """Raises ModelNotFound."""
        if name not in self._models:
            raise not_served(name, self._models)
        return self._models[name]

    def meant(self, fields: Mapping[str, Any]) -> ServedModel:
        """The model that a body names. Where it names none that there is, any: that one refuses it, beside whatever
        else is wrong with it."""
        name = fields.get("model")
        found = self._models.get(name) if isinstance(name, str) else None
        return found or self.first
