"""The tool and the form of answer that the programs ask for. Every value is bounded, so that any model ends."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ASKED = [{"role": "user", "content": "What is the weather in Bonn?"}]


class Forecast(BaseModel):
    """Get the weather."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Bonn", "Nîmes"]
    days: int = Field(ge=1, le=9)


SCHEMA = Forecast.model_json_schema()
FUNCTION = {"name": "get_weather", "description": "Get the weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def checked(arguments: str | object) -> Forecast:
    """Return the arguments of a call. Raises ValidationError if they do not follow the schema."""
    return Forecast.model_validate(json.loads(arguments) if isinstance(arguments, str) else arguments)
