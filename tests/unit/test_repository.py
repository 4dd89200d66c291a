"""Models are found by name and version, and everything wrong with them is said before one is opened."""

from pathlib import Path

import pytest

from inferq_worker.models.repository import RepositoryError, find_models


def put(models: Path, name: str, version: str, toml: str | None = None) -> Path:
    folder = models / name / version
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"x")
    if toml is not None:
        (folder / "model.toml").write_text(toml)
    return folder / "model.onnx"


def test_a_model_without_settings_gets_the_defaults(tmp_path: Path) -> None:
    path = put(tmp_path, "resnet", "1")
    (model,) = find_models(tmp_path, [])
    assert (model.name, model.version, model.path) == ("resnet", "1", path)
    assert (model.max_rows, model.batch, model.fallback) == (None, "probe", True)
    assert model.lanes == ("interactive", "bulk")
    assert model.shared_inputs == frozenset()
    assert (model.buckets, model.nan) == (None, "pass")


def test_the_newest_version_is_the_highest_number_not_the_last_word(tmp_path: Path) -> None:
    for version in ("9", "10", "beta"):
        put(tmp_path, "resnet", version)
    assert [model.version for model in find_models(tmp_path, [])] == ["10"]


def test_versions_without_a_number_are_ordered_as_words(tmp_path: Path) -> None:
    for version in ("2026-02", "2026-11"):
        put(tmp_path, "resnet", version)
    assert [model.version for model in find_models(tmp_path, [])] == ["2026-11"]


def test_every_version_comes_oldest_first_when_asked_for(tmp_path: Path) -> None:
    for version in ("9", "10", "beta"):
        put(tmp_path, "resnet", version)
    found = find_models(tmp_path, [], every_version=True)
    assert [model.version for model in found] == ["beta", "9", "10"]


def test_model_toml_is_read(tmp_path: Path) -> None:
    put(
        tmp_path,
        "vad",
        "3",
        'max_rows = 8\nshared_inputs = ["sr"]\nbatch = "single"\nfallback = false\nlanes = ["fast", "slow"]\n',
    )
    (model,) = find_models(tmp_path, [])
    assert (model.max_rows, model.shared_inputs, model.batch) == (8, frozenset({"sr"}), "single")
    assert (model.fallback, model.lanes) == (False, ("fast", "slow"))


def test_a_pinned_fingerprint_is_read_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "vad", "3", f'sha256 = "{"0a" * 32}"')
    assert find_models(tmp_path, [])[0].sha256 == "0a" * 32
    put(tmp_path, "vad", "4", 'sha256 = "0A"')
    with pytest.raises(RepositoryError, match="sha256"):
        find_models(tmp_path, [])


@pytest.mark.parametrize(("toml", "found"), [('"auto"', "auto"), ('"off"', "off"), ("[16, 4]", (16, 4))])
def test_buckets_and_the_fate_of_nan_are_read(tmp_path: Path, toml: str, found: object) -> None:
    put(tmp_path, "vad", "3", f'buckets = {toml}\nnan = "fail"\n')
    (model,) = find_models(tmp_path, [])
    assert (model.buckets, model.nan) == (found, "fail")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("max_row = 8", r"unknown key 'max_row'; did you mean 'max_rows'\?"),
        ("zzz = 8", "unknown key 'zzz'; the keys are max_rows"),
        ("max_rows = 0", "max_rows: .*greater than or equal to 1"),
        ("max_rows = true", "max_rows: .*valid integer"),
        ('max_rows = "8"', "max_rows: .*valid integer"),
        ('batch = "maybe"', "batch: .*'probe', 'trust' or 'single'"),
        ('lanes = ["Fast"]', r"lanes\.0: "),
        ("lanes = []", "lanes: .*at least 1"),
        ("max_rows = ", "cannot be read"),
        ("buckets = []", r"buckets\.sizes: .*at least 1"),
        ("buckets = [0]", r"buckets\.sizes\.0: .*greater than or equal to 1"),
        ('buckets = "on"', r"buckets\.word: .*'auto' or 'off'"),
        ("max_rows = 8\nbuckets = [4, 16]", "a bucket of 16 rows is above max_rows = 8; change one"),
        ('batch = "single"\nbuckets = [4]', 'buckets have no meaning with batch = "single"'),
        ('nan = "drop"', "nan: .*'pass' or 'fail'"),
    ],
)
def test_a_bad_model_toml_is_refused_with_its_path_and_the_key(tmp_path: Path, toml: str, message: str) -> None:
    put(tmp_path, "resnet", "1", toml)
    with pytest.raises(RepositoryError, match=message) as caught:
        find_models(tmp_path, [])
    assert str(tmp_path / "resnet" / "1" / "model.toml") in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"models folder .*absent is not there"):
        find_models(tmp_path / "absent", [])


def test_an_empty_folder_says_where_a_model_goes(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"no model in .*<name>/<version>/model\.onnx"):
        find_models(tmp_path, [])


def test_no_folder_and_no_file_says_how_to_give_one() -> None:
    with pytest.raises(RepositoryError, match=r"no model configured; .*--model FILE"):
        find_models(None, [])


def test_a_model_without_a_version_folder_is_told_to_move(tmp_path: Path) -> None:
    (tmp_path / "resnet").mkdir()
    (tmp_path / "resnet" / "model.onnx").write_bytes(b"x")
    with pytest.raises(RepositoryError, match=r"has no version; move it to .*1.model\.onnx"):
        find_models(tmp_path, [])


def test_a_version_without_its_file_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    put(tmp_path, "resnet", "1")
    (tmp_path / "resnet" / "2").mkdir()
    with pytest.raises(RepositoryError, match=r"2.model\.onnx is not there"):
        find_models(tmp_path, [])


def test_hidden_folders_and_loose_files_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "resnet", "1")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "README.md").write_text("notes")
    (tmp_path / "resnet" / ".partial").mkdir()
    assert [model.name for model in find_models(tmp_path, [])] == ["resnet"]


@pytest.mark.parametrize("name", ["Res.Net", "UPPER", "_x"])
def test_a_folder_that_is_no_model_name_is_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, "1")
    with pytest.raises(RepositoryError, match="is no model name"):
        find_models(tmp_path, [])


def test_a_single_file_is_named_after_itself_made_valid(tmp_path: Path) -> None:
    path = tmp_path / "My Model.v2.onnx"
    path.write_bytes(b"x")
    (model,) = find_models(None, [str(path)])
    assert (model.name, model.version, model.path) == ("my-model-v2", "1", path)


def test_a_single_file_can_be_given_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(b"x")
    assert find_models(None, [f"other={path}"])[0].name == "other"


def test_a_given_name_is_not_made_valid_silently(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    path.write_bytes(b"x")
    with pytest.raises(RepositoryError, match="'My Name' is no model name"):
        find_models(None, [f"My Name={path}"])


def test_a_path_with_an_equals_sign_is_still_a_path(tmp_path: Path) -> None:
    path = tmp_path / "lr=3.onnx"
    path.write_bytes(b"x")
    assert find_models(None, [str(path)])[0].name == "lr-3"


def test_settings_beside_a_single_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"x")
    (tmp_path / "a.toml").write_text("max_rows = 4")
    assert find_models(None, [str(tmp_path / "a.onnx")])[0].max_rows == 4


@pytest.mark.parametrize("what", ["absent.onnx", "folder"])
def test_a_single_file_that_is_no_file_is_named(tmp_path: Path, what: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(RepositoryError, match=f"{what} is"):
        find_models(None, [str(tmp_path / what)])


def test_one_name_for_two_files_is_refused_with_both_paths(tmp_path: Path) -> None:
    put(tmp_path, "resnet", "1")
    other = tmp_path / "resnet.onnx"
    other.write_bytes(b"x")
    with pytest.raises(RepositoryError, match=r"given twice: .*NAME=FILE") as caught:
        find_models(tmp_path, [str(other)])
    assert str(other) in str(caught.value)
