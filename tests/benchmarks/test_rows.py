"""Rows of finished runs: stable keys, one text."""

import _rows
import _sizes


def test_rows_of_another_text_are_left_out_with_a_note(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    for name, corpus in (("a", 1), ("b", 1), ("c", 2)):
        _rows.append(path, {"key": name, "corpus": corpus, "loss": 2.5})
    assert list(_rows.finished(path)) == ["a", "b"]
    assert "1 rows of other texts than 1" in capsys.readouterr().out
    assert list(_rows.finished(path, corpus=2)) == ["c"]


def test_keys_are_stable():
    hyper = {"learning_rate": 0.00316, "weight_decay": 0.1, "b2": 0.999}
    config = _sizes.config("cpu", "next_token", "adamw", 0, hyper)
    assert _rows.key_of(config) == "d34f537e7d072a5c"
    assert _rows.key_of(dict(reversed(config.items()))) == _rows.key_of(config)
    assert _rows.key_of({**config, "seed": 1}) != _rows.key_of(config)
    assert _rows.key_of({**config, "hyper": {**hyper, "b2": 0.99}}) != _rows.key_of(config)
