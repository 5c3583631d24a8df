"""Every code block of the README and of docs runs, as CONTRIBUTING.md ("Pages") says."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from support.pages import (
    PAGES,
    ROOT,
    RUNNER,
    Block,
    PageError,
    blocks_of,
    environment_of_page,
    is_slow,
    parse,
    steps_of,
    write_steps,
)
from support.printed import unprinted
from support.warm import warm_parent

LISTED = Path(__file__).with_name("not_run.txt")
BY_NAME = {page.relative_to(ROOT).as_posix(): page for page in PAGES}

# Pages whose blocks of text are not what their own blocks print.
SHOWN = {
    "docs/explain/interval.md": "a formula",
    "docs/howto/metrics.md": "alerts of Prometheus",
    "docs/index.md": "docs/start/fsdp2.md prints it",
    "docs/reference/cli.md": "generated; tests/cli/test_help.py runs the examples",
    "docs/reference/errors.md": "tests/house/test_errors_doc.py provokes them",
}
# What a fast disk, or a late kill, makes another line.
OF_CHANCE = (
    "unfinished    80  ",
    "step-80: 2 data files of a save that did not end; ...",
    "3 ranks start from step-60",
    "committed    80  ",
)


def blocks(name: str) -> list[Block]:
    return blocks_of(BY_NAME[name].read_text(), name)


def cases() -> list[object]:
    """Returns the pages that have something to run; one that starts ranks is slow."""
    slow = [pytest.mark.slow, pytest.mark.multirank]
    found: list[object] = []
    for name in BY_NAME:
        try:
            page = blocks(name)
        except PageError:
            continue  # the test below says so
        if steps_of(page) and name != "README.md":  # tests/house/test_first_minutes.py runs it
            found.append(pytest.param(name, id=name, marks=slow if is_slow(page) else []))
    return found


@pytest.mark.parametrize("name", cases())
def test_every_block_of_a_page_runs(name: str, tmp_path: Path, commands: Path) -> None:
    result, printed = run_page(blocks(name), tmp_path, commands)
    assert result == 0, printed
    lines = [] if name in SHOWN else unprinted(blocks(name), printed)
    wrong = [line for line in lines if not line.partition(": ")[2].startswith(OF_CHANCE)]
    assert wrong == [], printed


def test_every_block_of_every_page_parses() -> None:
    for name in BY_NAME:
        for block in blocks(name):
            parse(block)


def test_blocks_that_do_not_run_are_listed_with_their_reasons() -> None:
    found = [f"{b.page}: {b.not_run}" for name in BY_NAME for b in blocks(name) if b.not_run]
    assert sorted(found) == LISTED.read_text().splitlines()


def test_the_first_page_shows_what_the_tour_prints() -> None:
    (shown,) = (block for block in blocks("docs/index.md") if block.language == "text")
    assert shown.code in BY_NAME["docs/start/fsdp2.md"].read_text()


# ---- The conventions themselves -----------------------------------------------------------------


def run_page(blocks: list[Block], folder: Path, commands: Path) -> tuple[int, str]:
    """Runs the blocks in an empty directory below `folder`; returns exit status and output."""
    steps = write_steps(blocks, folder / "steps.json")
    (folder / "page").mkdir()
    done = warm_parent().run(
        [str(RUNNER), str(steps), "--fast"],
        env=environment_of_page(folder / "home", f"{commands}:{sysconfig.get_path('scripts')}"),
        cwd=folder / "page",
    )
    return done.returncode, done.stdout + done.stderr


GOOD = """# A page
<!-- test: setup
rows = 3
-->
```python
import os
x = rows + 1
print("files", sorted(os.listdir()))
```
```python
# tools/square.py
import sys
print(int(sys.argv[1]) ** 2)
```
1. In a list:
   ```sh
   pip install nothing-of-this-name
   python tools/square.py 12
   dcpx ls nowhere || test $? = 2
   echo one > one.txt
   false | cat
   ```
```yaml
# config.yaml
a: 1
```
```python
def doubled() -> int:
    return 2 * x

class Kept: pass

import pickle
print(doubled(), open("one.txt").read(), open("config.yaml").read(), pickle.dumps(Kept()))
```

<!-- test: not run: there is no Slurm here -->
```sh
sbatch job.sh
```
```text
any words
```
"""


def test_blocks_run_in_order_and_share_names_and_directory(tmp_path: Path, commands: Path) -> None:
    result, printed = run_page(blocks_of(GOOD), tmp_path, commands)
    assert result == 0, printed
    for text in ("files []", "144", "nowhere", "8 one", "a: 1", "Kept"):
        assert text in printed
    assert "sbatch" not in printed
    reasons = [block.not_run for block in blocks_of(GOOD) if block.not_run]
    assert reasons == ["there is no Slurm here"]


def test_shown_text_is_compared_but_for_what_is_of_one_run() -> None:
    printed = """saved 3 min ago  17 B
id 01ab45cd67ef, 2027-01-01T00:00:00Z
write  0.019  rank 0
tensor([0.3, 2.5])
"""
    for shown, is_printed in {
        "saved  12 s ago   3.22 MB": True,
        "saved ... 6.1 kB\n...\nid 21cfccee8971, 2026-11-29T13:20:07Z": True,
        "write  1.000  rank 1\ntensor([0.1, 2.0])": True,
        "saved  12 s ago   3.22 MB by 3 ranks": False,
        "id step-1": False,
    }.items():
        page = f"```python\nprint()\n```\n```text\n{shown}\n```\n"
        assert (unprinted(blocks_of(page), printed) == []) == is_printed, shown


@pytest.mark.parametrize(
    ("language", "code", "line", "said"),
    [
        ("python", "a = 1\nraise ValueError('why')\n", 4, "ValueError: why"),
        ("python", "import sys\nsys.exit(0)\n", 4, "SystemExit"),
        ("sh", "echo why >&2\nfalse\ntrue\n", 3, "why"),
        ("sh", "echo $UNSET_VARIABLE_OF_A_PAGE\n", 3, "unbound"),
    ],
)
def test_a_block_that_fails_is_named_with_page_and_line(
    tmp_path: Path, commands: Path, language: str, code: str, line: int, said: str
) -> None:
    text = f"# A page\n```{language}\n{code}```\n```python\nprint('next', 'block')\n```\n"
    result, printed = run_page(blocks_of(text), tmp_path, commands)
    assert result != 0 and "next block" not in printed, printed
    assert f"the block at {ROOT}/page.md:3 failed" in printed and said in printed
    assert language == "sh" or f'page.md", line {line}' in printed


def test_a_block_that_breaks_the_conventions_is_refused() -> None:
    for text, said in {
        "```\nx\n```\n": "page.md:1: a block in no language",
        "\n```ruby\nx\n```\n": "page.md:2: a block in ruby",
        "```python\nx\n": "page.md:1: a block without an end",
        "<!-- test: skip -->\n": "page.md:1: no such convention",
        "<!-- test: not run: why -->\nwords\n": "'not run' stands right above its block",
    }.items():
        with pytest.raises(PageError, match=said):
            blocks_of(text)


def test_a_block_that_does_not_run_parses_all_the_same() -> None:
    for language, bad, good in (
        ("python", "a = = 1\n", "...\n    break\n"),
        ("sh", "if true\n", "sbatch job.sh\n"),
        ("json", "{'a': 1}\n", '{"a": 1}\n'),
        ("yaml", "a: [1\n", "a: 1\n"),
        ("toml", "a 1\n", "a = 1\n"),
    ):
        reason = "<!-- test: not run: why -->\n" if language in ("python", "sh") else ""
        for block in blocks_of(f"{reason}```{language}\n{good}```\n"):
            parse(block)
        for block in blocks_of(f"{reason}```{language}\n{bad}```\n"):
            with pytest.raises(PageError, match=rf"page.md:{3 if reason else 2}: {language}"):
                parse(block)


def test_a_page_that_starts_ranks_is_slow() -> None:
    code = "```sh\ntorchrun --standalone train.py\n```\n"
    assert is_slow(blocks_of(code))
    assert not is_slow(blocks_of(f"<!-- test: not run: two nodes -->\n{code}"))
    assert not is_slow(blocks_of(GOOD))
