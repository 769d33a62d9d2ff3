from __future__ import annotations

from tandem.v1 import cluster_pb2
from worker.registration import peers_of


def test_peers_are_the_other_roles_agents_with_the_devices_of_their_pools() -> None:
    def worker(name: str, role: cluster_pb2.Role.ValueType, device: str) -> cluster_pb2.WorkerInfo:
        info = cluster_pb2.WorkerInfo(worker_id=name, epoch=7, model="m", role=role)
        info.agents.add(rank=0, host_id="h", mapped_path="/run/a", tcp_address="127.0.0.1:1", device=device)
        return info

    own = worker("prefill-0", cluster_pb2.ROLE_PREFILL, "")
    others = [worker("decode-0", cluster_pb2.ROLE_DECODE, "a-gpu"), worker("decode-1", cluster_pb2.ROLE_DECODE, "")]
    found = peers_of(cluster_pb2.Directory(workers=[own, *others]), own)
    assert [(peer.worker_id, peer.device) for peer in found] == [("decode-0", "a-gpu"), ("decode-1", "")]
