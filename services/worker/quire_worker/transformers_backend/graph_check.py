"""`graph_defect` tests, at each start on a GPU, whether a pass of a model may be captured as a CUDA graph.

A replayed graph runs the kernels of the pass that was captured. Modelling code that chooses its way by values, or that
keeps a result for the next pass, would need other kernels. Code that reads values cannot be captured at all.
"""

from __future__ import annotations

import torch

from quire_worker.cuda.graphs.graph_recorder import GraphRecorder, Recorder
from quire_worker.transformers_backend.attention import use_attention
from quire_worker.transformers_backend.row_check import IsolatedRows, Layers, relative_difference, tolerance

_TOKENS = 5


def graph_defect(model: Layers, vocab_size: int, max_positions: int, device: torch.device) -> str:
    """Test on a stream of its own whether a pass of the model can be captured as a CUDA graph. Returns the reason if it
    cannot; "": it can."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's; the default stream is never captured
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        defect = find_defect(model, vocab_size, max_positions, device, GraphRecorder())
    torch.cuda.current_stream().wait_stream(stream)
    return defect


def find_defect(model: Layers, vocab_size: int, max_positions: int, device: torch.device, recorder: Recorder) -> str:
    """Capture a pass of a few rows, replay it for other tokens and positions, and compare that with a new pass of
    these. Returns the error of the capture, or that results differ; "" if the graph is right. Errors outside of the
    capture are raised."""
    last = max_positions - 1
    token = torch.zeros(_TOKENS, dtype=torch.long, device=device)
    position = torch.zeros(_TOKENS, dtype=torch.long, device=device)
    with torch.inference_mode(), use_attention(IsolatedRows()):
        model.hidden(token, position)  # compiles kernels and makes what the code keeps
        recorder.begin()
        try:
            captured = model.hidden(token, position)
            graph = recorder.end()
        except Exception as error:
            recorder.abandon()
            first_line = next(iter(str(error).splitlines()), "no text")
            return f"{type(error).__name__}: {first_line[:200]}"
        token += torch.arange(1, 1 + _TOKENS, device=device) % vocab_size
        position += torch.tensor([last, last // 2, 1 % (last + 1), 0, last // 3], device=device)
        wanted = model.hidden(token, position).clone()
        graph.replay()
        difference = relative_difference(captured, wanted)
    return "" if difference <= tolerance(wanted) else "a replayed pass computes something else than a new one"
