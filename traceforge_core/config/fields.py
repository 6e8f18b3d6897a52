"""What every section of the configuration is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy takes
# YAML 1.1 reads a bare on or off as true or false.
Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]


class Section(BaseModel):
    """One section of the tree: unknown names are errors, values are checked on assignment too."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        # What a form calls it: "Long Context".
        model_title_generator=lambda section: re.sub(
            r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config")
        ),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, field: ValidationInfo) -> Any:
        """Pydantic takes true for 1."""
        annotation = cls.model_fields[str(field.field_name)].annotation
        kinds = {getattr(kind, "__origin__", kind) for kind in get_args(annotation) or (annotation,)}
        if isinstance(value, bool) and kinds & {int, float}:
            raise ValueError("must be a number")
        return value
