import pytest

from fleet_models.folders import is_prepared, write_folder


def test_folder_appears_whole_with_its_version(tmp_path):
    folder = tmp_path / "cache" / "model"

    with write_folder(folder, "1") as fresh:
        (fresh / "config.json").write_text("{}")
        assert not folder.exists()

    assert is_prepared(folder, "1")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "fleet_model.json"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError), write_folder(tmp_path / "model", "1"):
        raise RuntimeError

    assert list(tmp_path.iterdir()) == []


def test_new_version_replaces_the_old_one(tmp_path):
    folder = tmp_path / "model"
    for version in ("1", "2"):
        with write_folder(folder, version) as fresh:
            (fresh / f"file{version}").touch()

    assert is_prepared(folder, "2")
    assert not is_prepared(folder, "1")
    assert not (folder / "file1").exists()


def test_second_writer_of_the_same_version_is_dropped(tmp_path):
    folder = tmp_path / "model"
    with write_folder(folder, "1") as late:
        (late / "late").touch()
        with write_folder(folder, "1") as early:
            (early / "early").touch()

    assert (folder / "early").exists()
    assert not (folder / "late").exists()
