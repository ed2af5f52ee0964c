"""A site's unmodified scripts in the directory FOREBAY_SITE_SCRIPTS.

The files are `lua/burst_buffer.lua`, `bin/dw_wlm_cli`, `bin/dwstat` and `conf/pools.json`; @RUN@ stands for the
directory to which they write.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cluster.providers.conftest import Programs

SCRIPTS = os.environ.get("FOREBAY_SITE_SCRIPTS", "")

pytestmark = pytest.mark.skipif(not SCRIPTS, reason="FOREBAY_SITE_SCRIPTS names no directory of a site's scripts")


@pytest.fixture
def given(programs: Programs, tmp_path: Path) -> Programs:
    """Use the site's scripts instead of the tests' scripts."""
    source = Path(SCRIPTS)
    (tmp_path / "log").mkdir()
    (tmp_path / "dwctl").mkdir()
    shutil.copyfile(source / "conf" / "pools.json", tmp_path / "pools.json")
    programs.script.write_text((source / "lua" / "burst_buffer.lua").read_text().replace("@RUN@", str(tmp_path)))
    for name in ("dw_wlm_cli", "dwstat"):
        (tmp_path / name).unlink()
        shutil.copyfile(source / "bin" / name, tmp_path / name)
        (tmp_path / name).chmod(0o755)
    programs.variables["SLURM_CONF"] = str(tmp_path / "slurm.conf")
    return programs


@pytest.mark.parametrize("provider", ["lua", "datawarp"])
def test_every_operation_succeeds_with_site_scripts(given: Programs, provider: str) -> None:
    site, subject, directory = given.provider(provider), given.subject(), str(given.directory)
    site.process(subject, directory)
    site.setup(subject, directory)
    site.data_in(subject, directory)
    assert site.real_size(subject, directory) is None
    assert site.paths(subject, directory)
    site.pre_run(subject, directory)
    site.post_run(subject, directory)
    site.data_out(subject, directory)
    site.teardown(subject, True, directory)
    assert site.pools(directory)
    assert "args" in site.get_status(("args",), 0, 0, directory).lower()
