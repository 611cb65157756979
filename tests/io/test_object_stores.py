"""Dumps in object stores give the same result as dumps on a disk, and each failure gives one error message."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatchctl.api.analyze.analyze import analyze
from mismatchctl.data.reader import open_dump
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.frameworks.registry import find_preset
from mismatchctl.io import stores as clients
from tests.cli import command
from tests.factories.dump_files import content, read, wide, write
from tests.io import object_store
from tests.io.object_store import BUCKET, CUT, RESET, SECRETS
from tests.paths import SAMPLE_DATA

SAMPLES = SAMPLE_DATA
forget_clients = clients.open_filesystem.cache_clear


@pytest.fixture(scope="module")
def server():
    with object_store.bucket() as both:
        yield both


@pytest.fixture(name="proxy")
def _proxy(server, monkeypatch):
    proxy, _ = server
    proxy.heal()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    forget_clients()
    yield proxy
    forget_clients()


@pytest.fixture(name="put", scope="module")
def _put(server):
    def put(source, key):
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        for file in files:
            place = key if file == source else f"{key}/{file.relative_to(source).as_posix()}"
            server[1].put_object(Bucket=BUCKET, Key=place, Body=file.read_bytes())

    return put


def refuse(path, **options):
    with pytest.raises(DataError) as caught:
        content(open_dump([path], **options))
    error = caught.value
    assert error.exit_code == 4
    assert "\n" not in str(error)
    assert not any(secret in str(error) for secret in SECRETS.values())
    return error


def anywhere(result, root):
    data = json.loads(result.model_dump_json().replace(root, ""))
    data.pop("provenance")
    return data


@pytest.fixture(name="samples", scope="module")
def _samples(tmp_path_factory, put):
    root = tmp_path_factory.mktemp("here")
    for run in ("dense", "moe"):
        for file in sorted((SAMPLES / run).iterdir())[:3]:
            (root / "samples" / run).mkdir(parents=True, exist_ok=True)
            (root / "samples" / run / file.name).write_bytes(file.read_bytes())
    put(root / "samples", "samples")
    return root


@pytest.fixture(name="tree", scope="module")
def _tree(tmp_path_factory, put):
    root = tmp_path_factory.mktemp("tree")
    for name in ("run_1/step_1", "run_1/step_2", "run_1/step_10", "run_1/_tmp/z", "run_2/s", "a/x/s", "b/x/s"):
        write(root / f"t/{name}.parquet", wide((2,)))
    write(root / "t/bare", wide((2,)))
    for step in (1, 2, 10):
        source = write(root / f"t/hive/step={step}/s.parquet", wide((step,)))
        table = pq.read_table(source)
        with pa.ipc.new_file(root / f"t/hive/step={step}/t.arrow", table.schema) as writer:
            writer.write_table(table)
    (root / "t/run_1/README.md").write_text("words")
    put(root / "t", "t")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_stores_give_the_same_result_as_local_files(proxy, samples, threads):
    corrections = [find_preset("token_tis"), find_preset("geo_rs")]
    here, there = (
        analyze([f"{root}/samples/{run}" for run in ("dense", "moe")], corrections, threads=threads)
        for root in (str(samples), f"s3://{BUCKET}")
    )
    assert anywhere(there, f"s3://{BUCKET}") == anywhere(here, str(samples))
    assert [file.size for file in there.provenance.inputs] == [file.size for file in here.provenance.inputs]
    assert not any(secret in there.model_dump_json() for secret in SECRETS.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "paths",
    [
        ["t/run_1"],
        ["t/run_1/"],
        ["t/run_1", "t/run_2", "t/run_2/../run_2"],
        ["t/a/x", "t/b/x"],
        ["t/run_*"],
        ["t/run_1/step_*.parquet"],
        ["t/run_1/step_[12].parquet", "t/run_2"],
        ["t/**/*.parquet"],
        ["t/hive"],
        ["t/hive/step=*"],
        ["t/hive/step=*/*.arrow"],
        ["t/run_1/step_2.parquet"],
        ["t/bare"],
    ],
)
def test_stores_name_files_runs_and_partitions_as_local_files(monkeypatch, proxy, tree, paths):
    monkeypatch.chdir(tree)
    here, there = open_dump(paths), open_dump([f"s3://{BUCKET}/{path}" for path in paths])
    assert [file.path for file in there.files] == [f"s3://{BUCKET}/{file.path}" for file in here.files]
    assert [(file.run, file.partition, file.rows) for file in there.files] == [
        (file.run, file.partition, file.rows) for file in here.files
    ]
    assert content(there) == content(here)


@pytest.mark.slow
def test_row_groups_are_fetched_in_few_requests(tmp_path, proxy, put):
    write(tmp_path / "a.parquet", wide(range(60), step=list(range(60)), reward=[0.5] * 60), rows=30)
    put(tmp_path / "a.parquet", "few/a.parquet")
    dump = open_dump([f"s3://{BUCKET}/few/a.parquet"])
    proxy.heal()
    content(dump)
    assert len([1 for method, *_ in proxy.log if method == "GET"]) == 1  # for both row groups, of four columns


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("fault", [(500, "InternalError"), (503, "SlowDown"), RESET, CUT])
def test_temporary_failures_are_retried(tmp_path, proxy, put, fault, name):
    source = write(tmp_path / "a.parquet", wide(range(30), step=[1] * 30))
    table = pq.read_table(source)
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    put(tmp_path / name, f"flaky/{name}")
    proxy.faults, proxy.key = [fault], name
    dump = open_dump([f"s3://{BUCKET}/flaky/{name}"])
    proxy.faults = [fault]
    assert content(dump)["rollout"] == read(source)["rollout"]
    assert proxy.faults == []


@pytest.mark.parametrize(
    ("method", "fault", "words"),
    [
        ("HEAD", (403, "AccessDenied"), ["access is denied", "AWS_ACCESS_KEY_ID", "AWS_PROFILE"]),
        ("GET", (403, "AccessDenied"), ["access is denied"]),
        ("GET", (418, "Teapot"), ["cannot be read"]),
    ],
)
def test_permanent_failures_are_reported(tmp_path, proxy, put, method, fault, words):
    put(Path(write(tmp_path / "a.parquet", wide())), "bad/a.parquet")
    proxy.always, proxy.method = fault, method
    error = refuse(f"s3://{BUCKET}/bad/a.parquet")
    assert error.file == f"s3://{BUCKET}/bad/a.parquet"
    assert all(word in str(error) for word in words), str(error)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((403, "AccessDenied"), ["access is denied", "AWS_PROFILE"]),
        ((403, "InvalidAccessKeyId"), ["credentials are missing or are not accepted", "AWS_ACCESS_KEY_ID"]),
        ((403, "SignatureDoesNotMatch"), ["credentials are missing or are not accepted"]),
        ((400, "ExpiredToken"), ["credentials are missing or are not accepted"]),
        ((301, "PermanentRedirect"), ["another region", "AWS_REGION"]),
    ],
)
def test_folders_without_list_permission_are_reported(proxy, tree, fault, words):
    proxy.always, proxy.key = fault, "list-type"
    error = refuse(f"s3://{BUCKET}/t/*/*.parquet")
    assert all(word in str(error) for word in words), str(error)


def test_repeated_failures_stop_after_the_attempts(tmp_path, proxy, put, monkeypatch):
    monkeypatch.setattr(clients, "ATTEMPTS", 2)
    put(Path(write(tmp_path / "a.parquet", wide())), "bad/a.parquet")
    dump = open_dump([f"s3://{BUCKET}/bad/a.parquet"])
    forget_clients()
    proxy.always = (503, "SlowDown")
    with pytest.raises(DataError, match="the object store failed repeatedly; run again later"):
        content(dump)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (f"s3://{BUCKET}/nothing/a.parquet", "the file or folder does not exist"),
        (f"s3://{BUCKET}/nothing/*.parquet", "this pattern matches nothing"),
        ("s3://no-such-bucket/x/*.parquet", "the bucket does not exist"),
        ("s3://no-such-bucket/x", "does not exist"),
        ("s3://no-such-bucket", "does not exist"),
    ],
)
def test_missing_objects_are_reported(proxy, path, words):
    assert words in str(refuse(path))


def test_wrong_names_get_similar_suggestions(tmp_path, proxy, put):
    put(Path(write(tmp_path / "a.parquet", wide())), "near/run_one/a.parquet")
    assert "similar names in" in str(refuse(f"s3://{BUCKET}/near/run_onn"))


def test_an_unreachable_endpoint_is_reported(proxy, monkeypatch):
    monkeypatch.setattr(clients, "ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    forget_clients()
    assert "the store cannot be reached; check the network, and AWS_ENDPOINT_URL if it is set" in str(
        refuse(f"s3://{BUCKET}/x")
    )


def test_damaged_objects_give_the_same_error_as_local_files(tmp_path, proxy, put):
    source = Path(write(tmp_path / "a.parquet", wide()))
    source.write_bytes(source.read_bytes()[:-20])
    put(source, "broken/a.parquet")
    put(Path(write(tmp_path / "b.parquet", wide((1,)))), "broken/b.parquet")
    assert "this is not a complete Parquet file" in str(refuse(f"s3://{BUCKET}/broken"))
    assert len(content(open_dump([f"s3://{BUCKET}/broken"], on_bad="skip"))["rollout"]) == 1


def test_an_object_that_changes_while_read_is_reported(tmp_path, proxy, put):
    put(Path(write(tmp_path / "a.parquet", wide((1, 2)))), "change/a.parquet")
    dump = open_dump([f"s3://{BUCKET}/change/a.parquet"])
    put(Path(write(tmp_path / "a.parquet", wide((2, 1)))), "change/a.parquet")
    with pytest.raises(DataError, match="changed while it was being read"):
        content(dump)


def test_threads_share_a_store(tmp_path, proxy, put):
    put(Path(write(tmp_path / "a.parquet", wide((2, 3)))), "many/a.parquet")
    found = []

    def work():
        forget_clients()
        found.append(read(f"s3://{BUCKET}/many/a.parquet")["rollout"])

    command.at_once(*[work] * 4)
    assert found == [read(tmp_path / "a.parquet")["rollout"]] * 4


def test_analyze_reads_a_bucket(proxy, samples):
    result = command.run("analyze", f"s3://{BUCKET}/samples/dense", "--quiet", "--json", code=0)
    assert json.loads(result.stdout)["provenance"]["inputs"][0]["path"].startswith(f"s3://{BUCKET}/samples/dense/")
    result = command.run("analyze", "s3://no-such-bucket/x/*", code=4)
    assert "the bucket does not exist" in result.stderr


@pytest.mark.slow
def test_gate_reads_a_baseline_from_a_bucket(tmp_path, proxy, samples, put):
    dump = f"s3://{BUCKET}/samples/dense"
    saved = ["gate", dump, "--accept", "--save-baseline", str(tmp_path / "base.json")]
    command.run(*saved, code=0)
    put(tmp_path / "base.json", "baselines/base.json")
    for form in ("s3://", "s3:/"):
        result = command.run("gate", dump, "--baseline", f"{form}{BUCKET}/baselines/base.json", code=0)
    result = command.run("gate", dump, "--baseline", f"s3://{BUCKET}/baselines/none.json", code=4)
    assert "the object does not exist" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["analyze", "dumps", "-o", "s3://b/o.json"],
        ["sweep", "dumps", "-o", "s3://b/o.parquet"],
        ["gate", "dumps", "--save-baseline", "s3://b/o.json"],
        ["convert", "dumps", "s3://b/o.parquet"],
        ["analyze", "dumps", "--figures", "s3://"],
    ],
)
def test_outputs_to_a_store_are_refused(tmp_path, monkeypatch, words):
    """A local folder with the name of a scheme is also refused."""
    write(tmp_path / "dumps/a.parquet", wide())
    (tmp_path / "s3:/b").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    result = command.run(*words, code=2)
    assert f"{words[-1]}: mismatchctl cannot write to an object store" in result.stderr
    assert sorted(tmp_path.rglob("*")) == before
    assert not any((tmp_path / "s3:/b").iterdir())


def test_hugging_face_paths_use_its_package(tmp_path, monkeypatch):
    """A local folder replaces the hub."""
    import fsspec
    import huggingface_hub

    class Hub(fsspec.get_filesystem_class("dir")):
        def __init__(self):
            super().__init__(path=str(tmp_path), fs=fsspec.filesystem("file"))

    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Hub)
    forget_clients()
    for step in (2, 10):
        write(tmp_path / f"datasets/me/dumps/step={step}/a.parquet", wide((step,)))
    dump = open_dump(["hf://datasets/me/dumps"])
    forget_clients()
    assert [file.partition["step"] for file in dump.files] == [2, 10]
    assert [file.run for file in dump.files] == ["dumps"] * 2
    assert [len(row) for row in content(dump)["rollout"]] == [2, 10]
    forget_clients()


def test_an_unreachable_hub_is_reported(monkeypatch):
    import fsspec
    import huggingface_hub

    class ConnectError(Exception):
        """As of clients that know no OSError."""

    class Hub(fsspec.AbstractFileSystem):
        def info(self, path, **options):
            raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Hub)
    forget_clients()
    assert "the store cannot be reached" in str(refuse("hf://datasets/me/dumps"))
    forget_clients()


def test_hugging_face_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    forget_clients()
    with pytest.raises(ConfigError, match=r"pip install 'mismatchctl\[hf\]'"):
        open_dump(["hf://datasets/me/dumps"])
