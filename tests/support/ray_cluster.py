"""A Ray cluster of several nodes on this machine: python -P ray_cluster.py NUM_NODES.

Prints `address ADDRESS`. Each line of standard input is the beginning of a node's id: kills that node and prints
`killed ID`; the line "add" adds a node and prints `added ID`. Ends with its standard input.
"""

import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def main() -> None:
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": HEALTH_CHECKS})
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES) for _ in range(int(sys.argv[1]))]
        print("address", cluster.address, flush=True)
        for line in sys.stdin:
            node_id = line.strip()
            if node_id == "add":
                nodes.append(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))
                print("added", nodes[-1].node_id, flush=True)
                continue
            cluster.remove_node(next(node for node in nodes if node.node_id.startswith(node_id)), allow_graceful=False)
            print("killed", node_id, flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
