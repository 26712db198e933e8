"""Where one generation stands."""

from enum import StrEnum


class GenerationStatus(StrEnum):
    ACTIVE = "active"
    END_OF_SEQUENCE = "end_of_sequence"
    MAXIMUM_LENGTH = "maximum_length"
    CANCELLED = "cancelled"

    @property
    def is_done(self) -> bool:
        return self is not GenerationStatus.ACTIVE
