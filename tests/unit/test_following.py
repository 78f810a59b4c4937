"""What follows a save is done once, or dropped, whoever is at what when it is over."""

from functools import partial

import pytest

from air_lightning.checkpoint.following import Following
from amid import at_line


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("number", range(24))
def test_what_comes_at_any_line_of_the_end_is_seen_to_once(failed, number, caplog):
    """Added by another thread while the save ends, an action is run or dropped, never kept."""
    done, added = [], []
    following = Following(partial(done.append, "own"))
    following.add(partial(done.append, "first"), has_failed=lambda: failed)

    def add():
        added.append(True)
        following.add(partial(done.append, "late"), has_failed=lambda: failed)

    with at_line(number, Following.end, add):
        following.end(failed=failed, target="/c")
    wanted = ["own", "first", *(["late"] * len(added))]
    if failed:
        dropped = [record.args[0] for record in caplog.records if "are dropped" in record.message]
        assert (done, sum(dropped)) == ([], len(wanted) - 1)
    else:
        assert sorted(done) == sorted(wanted)
    assert added or number > 10


@pytest.mark.parametrize("failed", [False, True])
def test_what_comes_after_the_end_is_seen_to_at_once(failed):
    """Nobody else will look: whoever adds it runs or drops it."""
    done = []
    following = Following()
    following.end(failed=failed, target="/c")
    following.add(partial(done.append, "late"), has_failed=lambda: failed)
    assert done == ([] if failed else ["late"])
