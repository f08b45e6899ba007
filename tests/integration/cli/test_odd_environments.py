"""Commands where something is missing that most machines have: they work, or say what to do."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import moeless
from families import make_tiny, make_tokenizer

SOURCES = str(Path(moeless.__file__).parents[1])
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder():
    """A folder that every user may read."""
    with tempfile.TemporaryDirectory(prefix="moe-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def mixtral(folder):
    directory = folder / "mixtral"
    make_tiny("mixtral").save_pretrained(directory)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)
    return directory


def run(*arguments, before=(), environment=None, **options):
    """A command in a process of its own."""
    return subprocess.run(
        [*before, sys.executable, "-m", "moeless", *arguments],
        env=os.environ | {"PYTHONPATH": SOURCES} if environment is None else environment,
        capture_output=True,
        timeout=800,
        check=False,
        **options,
    )


def generates(model, prompt="hello", **options):
    """Whether a model answers; what it said if not."""
    done = run("generate", str(model), prompt, "--max-tokens", "3", **options)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"3 answer tokens" in done.stderr
    return done


def refused(done):
    """The one line with which a command ended."""
    assert done.returncode == 2, done.stderr.decode(errors="replace")
    (line,) = [line for line in done.stderr.decode().splitlines() if "error: " in line]
    assert "Traceback" not in done.stderr.decode()
    return line


LOCALES = {
    "C": {"LC_ALL": "C"},
    "C without UTF-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("locale", LOCALES)
def test_prompts_and_answers_outside_ascii_whatever_the_locale(mixtral, locale):
    environment = os.environ | {"PYTHONPATH": SOURCES} | LOCALES[locale]
    done = generates(mixtral, "Grüße für die Bären".encode(), environment=environment)
    plain = generates(mixtral, "Grüße für die Bären")
    prompt_tokens = [each.stderr.splitlines()[-1].split()[1] for each in (done, plain)]
    assert prompt_tokens[0] == prompt_tokens[1]


def test_a_prompt_that_is_no_text_is_refused(mixtral):
    line = refused(run("generate", str(mixtral), b"Gr\xfc\xdfe"))
    assert "PROMPT is not text" in line
    line = refused(run("generate", str(mixtral), "-", input=b"Gr\xfc\xdfe"))
    assert "PROMPT is not text" in line


def test_without_any_variable_of_the_environment(mixtral):
    generates(mixtral, environment={"PYTHONPATH": SOURCES})


def test_a_folder_for_temporary_files_with_a_long_path(mixtral, tmp_path):
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    environment = os.environ | {"PYTHONPATH": SOURCES}
    environment |= {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    generates(mixtral, environment=environment)


def test_with_limits_on_memory_and_open_files(mixtral):
    if shutil.which("prlimit") is None:
        pytest.skip("needs prlimit")
    generates(mixtral, before=["prlimit", "--nofile=64", f"--as={4 << 30}"])


@pytest.fixture
def as_nobody():
    """What has a command run as a user without rights, home or capabilities."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root, with setpriv, can become somebody else")
    path = Path(sys.executable)
    for folder in [*path.parents, *path.resolve().parents]:
        if not folder.stat().st_mode & 0o005:
            pytest.skip(f"{folder} cannot be read by others")
    user = ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    return ["setpriv", *user, "--bounding-set=-all"]


def test_as_a_user_without_rights_and_without_a_home(mixtral, as_nobody):
    temporary = mixtral.parent / "temporary"
    temporary.mkdir(mode=0o700)
    os.chown(temporary, 65534, 65534)
    environment = {"PYTHONPATH": SOURCES, "HOME": "/proc/nowhere", "TMPDIR": str(temporary)}
    generates(mixtral, before=as_nobody, environment=environment)
    # What it compiled is there for the next process; sockets are not left.
    assert [left.name for left in temporary.glob("moeless-*")] == ["moeless-compiled-65534"]


def test_a_model_that_may_not_be_read_is_refused(mixtral, as_nobody):
    mixtral.parent.chmod(0o700)
    try:
        line = refused(run("inspect", str(mixtral), before=as_nobody))
    finally:
        mixtral.parent.chmod(0o755)
    assert f"{mixtral} cannot be read" in line


@pytest.fixture
def mounted():
    """What has a command run with folders that are empty and cannot be written."""
    unshare = ["unshare", "--mount"]
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root, with unshare, can mount")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")

    def wrap(*folders):
        mounts = [f"mount -t tmpfs -o ro none {folder}" for folder in folders]
        return [*unshare, "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]

    return wrap


def test_without_shared_memory_as_a_folder(mixtral, mounted):
    generates(mixtral, before=mounted("/dev/shm"))


def test_where_no_folder_for_temporary_files_can_be_written(mixtral, mounted, tmp_path):
    away = Path("/var/lib")  # not below what is hidden
    copy = Path(shutil.copytree(mixtral, away / f"moeless-test-{os.getpid()}"))
    try:
        environment = os.environ | {"PYTHONPATH": SOURCES, "XDG_RUNTIME_DIR": ""}
        if SOURCES.startswith("/tmp"):
            sources = shutil.copytree(SOURCES, copy / "src")
            environment["PYTHONPATH"] = str(sources)
        environment.pop("TMPDIR", None)
        done = run(
            "generate",
            str(copy),
            "hello",
            before=mounted("/tmp", "/var/tmp"),
            environment=environment,
            cwd="/proc",
        )
        assert "set TMPDIR" in refused(done)
    finally:
        shutil.rmtree(copy)
