"""The predictor of a folder: which one cog.yaml names, how it is imported, and how it is set up."""

from __future__ import annotations

import pytest

from compile_cache.cli.fill_command import load_predictor, read_project, set_up
from compile_cache.errors import CompileCacheError

CONFIGURATION = 'environment:\n  - FROM_COG_YAML=1\nrun: "predict.py:Predictor"\n'


def test_a_folder_without_a_predictor_is_no_project(tmp_path):
    with pytest.raises(CompileCacheError, match="--predictor"):
        read_project(tmp_path, None)


def test_a_predictor_that_is_given_replaces_the_one_of_cog_yaml_by_either_name_of_cogs_entry(tmp_path):
    (tmp_path / "cog.yaml").write_text(CONFIGURATION)
    assert read_project(tmp_path, None) == ("predict.py:Predictor", {"FROM_COG_YAML": "1"})
    assert read_project(tmp_path, "other.py")[0] == "other.py"
    (tmp_path / "cog.yaml").write_text("predict: predict.py:Runner\n")
    assert read_project(tmp_path, None) == ("predict.py:Runner", {})


@pytest.mark.parametrize("content", ["[1, 2]", "run: [", "environment: [NAME]\nrun: predict.py"])
def test_a_cog_yaml_that_is_none_is_named(tmp_path, content):
    (tmp_path / "cog.yaml").write_text(content)
    with pytest.raises(CompileCacheError, match=r"cog\.yaml"):
        read_project(tmp_path, None)


def test_a_class_or_a_file_that_is_not_there_is_named(tmp_path):
    (tmp_path / "one_predictor.py").write_text("class Predictor: pass\n")
    with pytest.raises(CompileCacheError, match=r"missing_predictor\.py does not exist"):
        load_predictor("missing_predictor.py:Predictor", tmp_path)
    with pytest.raises(CompileCacheError, match="has no Other"):
        load_predictor("one_predictor.py:Other", tmp_path)
    assert type(load_predictor("one_predictor.py", tmp_path)).__name__ == "Predictor"


def test_an_asynchronous_setup_is_waited_for_and_gets_its_weights(monkeypatch):
    monkeypatch.setenv("COG_WEIGHTS", "/weights")
    given = []

    class Asynchronous:
        async def setup(self, weights: str | None = None) -> None:
            given.append(weights)

    set_up(Asynchronous())
    assert given == ["/weights"]
