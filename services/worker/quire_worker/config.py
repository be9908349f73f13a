"""The worker's configuration. Names are vLLM's where vLLM has one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from quire_common.config import ServiceConfig, option
from quire_common.kv.page_mac import KEY_FILE_HELP, KEY_HELP
from quire_worker.engine.spec import STEP_TIMEOUT_S
from quire_worker.kv_transfer.transports import registry as transports

DEFAULT_KV_CACHE_BYTES = 256 << 20
CPU_SEQUENCES = 256
CUDA_SEQUENCES = 512
CPU_PAGE_SIZE = 16
CUDA_PAGE_SIZE = 64


@dataclass(frozen=True)
class WorkerConfig(ServiceConfig):
    """One engine replica's muscle: runs the model and holds its KV pages, as a scheduler grants."""

    model: str = option(
        "",
        "folder of the model (Hugging Face layout: config.json, safetensors), a GGUF file, or a name of the Hugging "
        "Face hub (org/name), which is downloaded where the hub's cache does not have it",
    )
    revision: str = option("", "branch, tag or commit of a model of the hub; default: main")
    download_dir: str = option("", "cache of the hub's models; default: HF_HUB_CACHE, or hub in HF_HOME")
    hf_overrides: str = option(
        "", 'JSON object of fields that replace those of config.json: {"max_position_embeddings": 4096}'
    )
    generation_config: str = option(
        "auto",
        "where defaults of sampling parameters are read; auto: the model's generation_config.json; vllm: nowhere; or a "
        "folder that has such a file",
    )
    override_generation_config: str = option(
        "", 'JSON object of such defaults, which win over the file: {"temperature": 0.5}'
    )
    served_model_name: str = option("", "name that clients know the model by; default: --model as it is given")
    max_model_len: int = option(0, "longest sequence in tokens; 0: the model's own context", at_least=0)
    max_num_seqs: int = option(0, "sequences that decode in one step; 0: 256, on a GPU 512", at_least=0)
    num_slots: int = option(
        0, "sequences that may be started at once, decoding or ready to; 0: 2.5 times --max-num-seqs", at_least=0
    )
    max_constrained_seqs: int = option(
        256,
        "sequences that a grammar constrains at once, of those in slots; further ones wait; 0: no structured output",
        at_least=0,
        at_most=4096,
    )
    matcher_processes: int = option(
        0,
        "processes that apply grammars, each with the model's tokens in memory; 0: one, and on a GPU one for every two "
        "processors, at most eight",
        at_least=0,
        at_most=32,
    )
    kv_cache_memory_bytes: int = option(0, "bytes of KV pages; 0: 256 MiB, or what a GPU has left", at_least=0)
    block_size: int = option(0, "tokens per KV page; 0: 16, on a GPU 64", at_least=0, at_most=1024)
    device: str = option("auto", "where the model runs; auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory for this process and other programs together; what they, weights and steps leave "
        "of it holds KV pages",
        at_least=0.01,
        at_most=1,
    )
    max_num_batched_tokens: int = option(
        0,
        "most prompt tokens of one step on a GPU, for which memory is kept and graphs are made; 0: 8192, or 16384 if "
        "weights take less than 2 GiB",
        at_least=0,
    )
    enforce_eager: bool = option(False, "launch a GPU's kernels one by one: the plain twin of captured graphs")
    batch_invariant: bool = option(
        False, "a request's bits do not depend on those beside it; always so on the CPU, on a GPU at a price"
    )
    dtype: str = option(
        "auto",
        "type of the weights; on the CPU bfloat16 and float16 round linear and embedding weights to it at load, auto "
        "and float32 keep each value of the file, and activations are float32 always; a GPU has bfloat16 alone",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    quantize: str = option(
        "none",
        "int8, on the CPU: linear and embedding weights of floats become int8 blocks of 32 values at load; none: "
        "weights are computed with as the file has them",
        choices=("none", "int8"),
    )
    load_format: str = option(
        "auto",
        "format of the weights; auto: as --model is a folder or a GGUF file; dummy: random weights",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    model_impl: str = option(
        "auto",
        "what computes the model's layers: quire (a family of Quire's own), transformers (its modelling code, "
        "with Quire's pages and attention), or auto: the first of these that has the architecture; vllm: as quire",
        choices=("auto", "quire", "vllm", "transformers"),
    )
    seed: int = option(0, "seed of dummy weights", at_least=0, at_most=2**64 - 1)
    attention_backend: str = option(
        "auto",
        "what computes attention; on the CPU cpu (compiled kernels) or torch (the reference); on a GPU cudnn (Triton "
        "kernels, and cuDNN for long prompts) or triton (these kernels alone); auto: the first that the device has",
        choices=("auto", "cpu", "torch", "cudnn", "triton"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of KV pages; auto: what is computed in; fp8: e4m3 on a GPU, half the memory, a little less exact",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    logits_processors: tuple[str, ...] = option(
        (), "logits processors that requests may name, of those that installed packages register"
    )
    worker_timeout_s: float = option(
        STEP_TIMEOUT_S,
        "longest time of a step; one that takes longer, once its run is over, hangs, and the worker ends; the same as "
        "the scheduler's",
        at_least=1,
    )
    torch_threads: int = option(
        0,
        "threads that compute a step on the CPU; 0: one for each core that affinity and quota leave, fewer while "
        "neighbours need the cores",
        at_least=0,
    )
    lockstep: bool = option(False, "form a step only when the one before has ended: the plain twin of free running")
    kvstore: str = option("", "host:port of a kvstore for page moves; empty: every move fails at once")
    kv_transport: str = option(
        "auto",
        "how pages travel: where they lie (same host), data port, or gRPC; auto: the first of these that is open",
        choices=transports.choices(transports.Traffic.STORE),
    )
    page_mac_key: str = option("", KEY_HELP, secret=True)
    page_mac_key_file: str = option("", KEY_FILE_HELP, file_of="page_mac_key")
    mover_ring_bytes: int = option(
        0, "memory that a KV transfer agent shares with the engine; 0: 64 pages, at most 256 MiB", at_least=0
    )
    peer_listen: str = option(
        "auto", "host:port where other workers pull pages; auto: a free port on the host of --listen; off: nowhere"
    )
    peer_advertise: str = option(
        "", "host under which other workers reach --peer-listen; default: that of --advertise, or what is listened on"
    )
    peer_grpc_listen: str = option(
        "auto", "host:port where other workers pull pages over gRPC if --peer-listen is out of reach; as that"
    )
    peer_hosts: tuple[str, ...] = option(
        (),
        "where workers may be that this one pulls pages from: addresses, networks, names or *.domain, each with a port "
        "or without; default: this host. No other address of a ticket is dialled",
    )
    peer_transport: str = option(
        "auto",
        "how pages travel from one worker to another: cuda_ipc (from GPU to GPU of a host), shm (same host), tcp or "
        "grpc; auto: the first of these that is open; nixl (by name alone, at both ends): RDMA, with the extra nixl",
        choices=transports.choices(transports.Traffic.PEER),
    )
    paced: float | None = option(
        None,
        "milliseconds: no model, but steps of this time and made-up tokens; --model gives sizes",
        at_least=0,
        at_most=3_600_000,
    )
    paced_prefill_us_per_token: float = option(
        0.0, "how much longer a paced step takes per prompt token", at_least=0, at_most=1_000_000
    )
    paced_pages: int = option(0, "KV pages of a paced worker; 0: as --kv-cache-memory-bytes says", at_least=0)
    paced_yields: int = option(
        0,
        "seed by which a paced worker's rows draw no token, one or several in a step; answers stay; 0: one each",
        at_least=0,
    )
    paced_fault: tuple[str, ...] = option(
        (), "what goes wrong in a paced worker: die@N, hang@N, nan@N, silent@N, slow@N:MS, wrong-epoch@N; N is a step"
    )

    @cached_property
    def name(self) -> str:
        """What the model is called towards clients."""
        return self.served_model_name or self.model or ("" if self.paced is None else "paced")

    @cached_property
    def page_size(self) -> int:
        """Tokens per page on the CPU."""
        return self.page_size_on("cpu")

    def page_size_on(self, device: str) -> int:
        """Tokens per page on cpu or cuda."""
        return self.block_size or (CUDA_PAGE_SIZE if device == "cuda" else CPU_PAGE_SIZE)

    def sequences_on(self, device: str) -> int:
        """Sequences that decode in one step on cpu or cuda."""
        return self.max_num_seqs or (CUDA_SEQUENCES if device == "cuda" else CPU_SEQUENCES)

    @cached_property
    def kv_cache_bytes(self) -> int:
        """Bytes of the page pool on the CPU."""
        return self.kv_cache_memory_bytes or DEFAULT_KV_CACHE_BYTES
