"""Reads what a captured graph holds: the proof that a fast path is in it, not merely importable.

Promises names as the driver knows them: Triton kernels under their Python name, C++ kernels mangled.
It does not sort kernels into families, and does not follow child graphs.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Census:
    """The nodes of one graph: how many, of which types, and each kernel's name with its count."""

    nodes: int
    node_types: dict[str, int]
    kernels: dict[str, int]


def read_graph(raw_graph: int) -> Census | None:
    """Count the nodes and kernels of a captured graph.

    Args:
        raw_graph: `torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph()`, after the capture ended.
    Returns:
        The census, or None where `cuda.bindings` is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        return None

    def checked(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"reading the captured graph failed: {status.name}")
        return values[0] if len(values) == 1 else values

    def kernel_name(node: Any) -> str:
        params = checked(driver.cuGraphKernelNodeGetParams(node))
        # A kernel of a lazily loaded library has no function, only a kernel handle.
        name = driver.cuFuncGetName(params.func) if int(params.func) else driver.cuKernelGetName(params.kern)
        return checked(name).decode()

    graph = driver.CUgraph(init_value=raw_graph)
    num_nodes = checked(driver.cuGraphGetNodes(graph, 0))[1]
    nodes = checked(driver.cuGraphGetNodes(graph, num_nodes))[0] if num_nodes else []
    node_types: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for node in nodes:
        node_type = checked(driver.cuGraphNodeGetType(node))
        node_types[node_type.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()] += 1
        if node_type == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            kernels[kernel_name(node)] += 1
    return Census(num_nodes, dict(node_types), dict(kernels.most_common()))
