"""The names of vLLM's engine arguments, read from its source, are those of its class."""

from __future__ import annotations

from dataclasses import fields

import pytest

from verl.rollout.vllm.checks import ARGUMENTS, list_vllm_arguments

pytestmark = pytest.mark.contract


def test_the_names_in_the_source_are_the_fields_of_the_class() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils")
    assert list_vllm_arguments() == {field.name for field in fields(arguments.AsyncEngineArgs)}
    assert {*ARGUMENTS.settings, *ARGUMENTS.reserved} <= list_vllm_arguments()
