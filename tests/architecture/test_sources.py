"""Rules about the sources that neither ruff nor import-linter can say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.source import PRODUCTION, ROOT, imports_of, python_files, text_of, tracked_files

LINES_MAX = 400
TEXT_SUFFIXES = {".py", ".proto", ".md", ".toml", ".yml", ".yaml", ".json", ""}
WORDS_THAT_SAY_NOTHING = re.compile(r"(^|_)(managers?|helpers?|utils?|common|misc)(_|$)")

# Where protobuf stops inside a service; app.py joins servicers to servers, so it may know their registration, but no
# message. For `protocol` conversion is the subject, and `runtime` speaks google.rpc.
SERVICES = {"tokenizer", "detokenizer", "scheduler"}
PROTOBUF_FILES = {"wire.py", "servicer.py", "upstream.py"}
PROTOBUF = re.compile(r"(tailrace\.v1|google\.protobuf)\b")
# The GenerationService seam of `protocol` hands these the contract's own messages.
PROTOBUF_SEAM = {"services/tokenizer/local.py", "services/tokenizer/shell.py", "services/tokenizer/text_calls.py"}
REGISTRATION = re.compile(r"tailrace\.v1\.\w+_pb2_grpc\b")

# Assembled, so that this file doesn't hold what it forbids.
REGISTRY_HOSTS = [
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "npmjs" + ".org",
    "deb." + "debian.org",
    "huggingface" + ".co",
    "download." + "pytorch.org",
]
MACHINE_PATHS = ["/" + "work/", "/root" + "/."]


def test_no_source_file_outgrows_one_concept() -> None:
    lines = {str(path): len(text_of(path).splitlines()) for path in python_files(*PRODUCTION, "bench", "deploy")}
    long = {path: count for path, count in lines.items() if count > LINES_MAX}
    assert not long, f"over {LINES_MAX} lines, so about more than one thing: split by noun"


def test_proto_is_no_python_package() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py*"))


@pytest.mark.parametrize("root", ["build/gen/tailrace", "clients/python/tailrace"])
def test_the_shared_namespace_has_no_init_that_would_hide_its_other_half(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists()


@pytest.mark.parametrize("needle", REGISTRY_HOSTS + MACHINE_PATHS)
def test_no_file_names_a_registry_host_or_somebodys_machine(needle: str) -> None:
    assert not [str(path) for path in tracked_files() if needle in text_of(path)]


def test_inside_a_service_protobuf_stops_at_the_files_made_for_it() -> None:
    inside = [path for path in python_files("services") if path.parts[1] in SERVICES]
    assert not [
        f"{path} imports {name}"
        for path in inside
        if path.name not in PROTOBUF_FILES and str(path) not in PROTOBUF_SEAM
        for name in imports_of(path)
        if PROTOBUF.match(name) and not (path.name == "app.py" and REGISTRATION.match(name))
    ]


def test_generated_code_is_not_in_git() -> None:
    assert not [str(path) for path in tracked_files() if re.search(r"_pb2(_grpc)?\.pyi?$", path.name)]


def test_every_text_file_ends_with_one_newline() -> None:
    texts = {path: text_of(path) for path in tracked_files() if path.suffix in TEXT_SUFFIXES}
    assert not [str(path) for path, text in texts.items() if text and not re.search(r"[^\n]\n\Z", text)]


def test_no_file_has_a_name_that_says_nothing() -> None:
    words = {path: [Path(part).stem for part in path.parts] for path in python_files(*PRODUCTION)}
    assert not [str(path) for path, parts in words.items() if any(map(WORDS_THAT_SAY_NOTHING.search, parts))]


def test_no_link_in_the_documentation_is_dead() -> None:
    links = [
        (document, target)
        for document in tracked_files()
        if document.suffix == ".md"
        for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text_of(document))
    ]
    assert not [f"{document}: {target}" for document, target in links if not (ROOT / document.parent / target).exists()]
