"""Aim: the commands of a local cluster mean the same daemons, however its directory is spelled.

Method: a real cluster, asked about, added to and ended under other names of its directory.
"""

from __future__ import annotations

import pytest

from tests.support.processes import DaemonCluster, Site

pytestmark = pytest.mark.integration


def test_a_cluster_is_found_under_every_name_of_its_directory(own_site: Site) -> None:
    cluster = DaemonCluster(own_site)
    link = own_site.directory / "link"
    link.symlink_to(cluster.directory)
    cluster.start()
    pids = {daemon["pid"] for daemon in cluster.daemons()}
    spellings = (str(link), "cluster", "./link/../cluster/", "link/.")
    for spelling in spellings:
        shown = own_site.manage("cluster", "status", "--json", "--dir", spelling)
        assert {(one["pid"], one["alive"]) for one in shown.json["daemons"]} == {
            (pid, True) for pid in pids
        }, spelling
        again = own_site.manage("cluster", "start", "--taskmanagers", "1", "--dir", spelling)
        assert again.status == 0, again.stderr
        assert {daemon["pid"] for daemon in cluster.daemons()} == pids, spelling
    ended = own_site.manage("cluster", "stop", "--json", "--dir", str(link))
    assert {one["pid"] for one in ended.json["stopped"]} == pids
    cluster.assert_nothing_left()
