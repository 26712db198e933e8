"""The error of a field whose value is out of bounds: an InvalidRequest to the service, a ValueError to a caller."""

import msgspec

from pronghorn.errors import ErrorRecord, InvalidRequest


class InvalidValue(InvalidRequest, ValueError):
    """Names the field, the value and the bound. Crosses a process as the InvalidRequest that it is."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        super().__init__(f"{field} is {value!r}; it must be {bound}", param=field)

    def record(self) -> ErrorRecord:
        return msgspec.structs.replace(super().record(), kind=InvalidRequest.__name__)
