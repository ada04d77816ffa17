"""The catalogue of diagnostic codes: one row per code, and nothing else.

SC0xx reading a plan or a model spec, SC1xx mesh, axes and world, SC2xx strategies against
the model, SC3xx capture, SC4xx placement findings, SC5xx calls and ranks, SC9xx parts of
the language that are not available yet. A code keeps its meaning for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """Severity, one-line title and explanation of a code."""

    code: str
    severity: Severity
    title: str
    text: str


# (code, severity, title, explanation)
_ROWS: tuple[tuple[str, Severity, str, str], ...] = (
    # --- reading a plan -------------------------------------------------------------------
    ("SC001", "error", "the plan cannot be read",
     "The file is missing, is not a regular file, or is not UTF-8 text."),
    ("SC002", "error", "the plan is not valid YAML",
     "The YAML parser stopped at the place shown; a frequent cause is a tab used to indent."),
    ("SC003", "error", "the plan is not a mapping",
     "A plan is one YAML mapping with the keys mesh and strategies."),
    ("SC004", "error", "a key is given twice",
     "YAML would silently keep the last one; a plan must say everything once."),
    ("SC005", "error", "anchors, aliases and tags are not part of the plan language",
     "They can make a small file expand without bound or construct objects; write values out."),
    ("SC006", "error", "the plan is too large or nested too deeply",
     "Plans are a few dozen lines and at most a few levels deep; limits keep reading cheap."),
    ("SC007", "error", "unknown key",
     "Unknown keys are refused, so that a misspelt option is never ignored."),
    ("SC008", "error", "wrong type of value",
     "Values are not converted: a number in quotes is text, and true is not 1."),
    ("SC009", "error", "value not allowed here", "The key takes one of a fixed set of values."),
    ("SC010", "error", "number out of range", "Sizes, lengths and counts start at 1."),
    ("SC011", "error", "a required key is missing", "The key has no default."),
    ("SC012", "error", "unknown preset or plan file",
     ("A plan is named by a path, or by a preset such as ring_4, ulysses_8, usp_4x8, "
      "megatron_sp_8, data_2, fsdp, or several of them joined by +.")),
    ("SC013", "error", "a preset names a strategy twice",
     "usp_RxU stands for ring and ulysses; each strategy may appear once in a composition."),
    ("SC014", "error", "not a usable name",
     "Axis names are identifiers; match patterns are module paths with * and **."),
    ("SC015", "error", "a plan of this type cannot be read",
     "A plan is a path, a preset name, YAML text, a dict or a Plan."),
    ("SC020", "error", "the model spec cannot be read",
     ("A model is an nn.Module or hf:<Architecture>[?key=value&...], hf:path/config.json, "
      "titan:<model>/<flavor> or python:<module>:<factory>.")),
    ("SC021", "error", "the model cannot be built from its spec",
     "The library or the factory named in the spec raised an error."),
    ("SC022", "error", "the model cannot be analysed",
     "Heads, lengths and masks could not be read from the model."),
    ("SC024", "error", "there is nothing to differentiate",
     "The verifier compares gradients: some output must depend on parameters."),
    ("SC025", "error", "the functions cannot be sent to other processes",
     "Real ranks import the functions that build the model and its inputs by name."),
    ("SC026", "error", "the model does not fit this machine",
     "The verifier holds a copy of the model, and its gradients, for every rank."),
    ("SC027", "error", "unknown cluster",
     "A cluster is one of those that seqcomp knows, or a YAML file of the same format."),
    ("SC028", "error", "the cluster file cannot be read",
     "A cluster file names a device and two links, or writes them out, each number with a source."),
    ("SC029", "error", "the cluster has no speed in this dtype",
     "A device has peak_tflops for the dtypes that it computes in."),
    ("SC031", "error", "the file cannot be written", "The path is no file that can be made."),
    ("SC032", "error", "no such module in the program",
     "A graph is drawn of a module that the forward calls."),
    # --- mesh, axes, world ----------------------------------------------------------------
    ("SC101", "error", "a strategy uses an axis that the mesh does not have",
     "Every axis named by a strategy is an entry of mesh."),
    ("SC102", "error", "a mesh axis serves no strategy",
     "Ranks along an unused axis would repeat the work of others; name what it is for."),
    ("SC103", "error", "an axis is used twice",
     "An axis serves exactly one strategy; only fsdp may share the axes of others."),
    ("SC104", "error", "the mesh does not match the world size",
     "The product of the sizes in mesh is the number of processes."),
    ("SC105", "error", "torch.distributed is not initialised",
     "Start with torchrun and call torch.distributed.init_process_group first."),
    ("SC106", "error", "the given DeviceMesh does not match the plan",
     "Its dimension names and sizes are those of mesh, in the same order."),
    ("SC107", "error", "an override matches no module",
     "In match, * is one path component and ** any number of them."),
    ("SC108", "error", "an override concerns a strategy that the plan does not have",
     "Overrides refine strategies of the plan; they do not add any."),
    ("SC109", "error", "an override changes nothing, or asks for two opposite things",
     "An override sets ring, token_local or gather; token_local and gather exclude each other."),
    ("SC110", "error", "an input's dimensions contradict each other",
     "batch and seq are different dimensions, and length needs seq."),
    ("SC111", "error", "an input or output named in the plan does not exist in the model",
     "Names are the arguments of the model's forward and the keys of its outputs."),
    ("SC112", "error", "fsdp cannot shard over the tensor axis",
     "Parameters are already sharded there by megatron_sp."),
    ("SC113", "error", "fsdp has no axis to shard over",
     "By default it uses the axes of data, ring and ulysses."),
    ("SC116", "error", "memory.checkpoint finds no blocks",
     "What runs again in backward is a repeated block of the model: a layer of a list of layers."),
    ("SC117", "error", "memory.offload has nothing to move",
     "What waits on the host is what checkpoints keep; without memory.checkpoint there is none."),
    ("SC118", "error", "memory.loss_chunks finds no loss that it can cut",
     ("The chunked loss replaces a linear head and the cross-entropy of its logits, of which "
      "nothing else in the call, and no output, may make use.")),
    ("SC120", "error", "the plan has more ranks than the cluster has GPUs",
     "Every rank has a GPU of its own; a cluster has max_nodes x gpus_per_node of them."),
    ("SC121", "error", "the plan does not fit in memory",
     "What one rank holds at the worst moment of a step, by formula, is more than its GPU has."),
    ("SC122", "error", "no plan fits in memory",
     "Every composition of strategies holds more than a GPU has, whatever is given up for memory."),
    ("SC131", "error", "the trainer's settings do not match the plan",
     "The trainer decides which rank gets which data, and it must deal as the plan expects."),
    # --- strategies against the model -----------------------------------------------------
    ("SC201", "error", "ulysses: the degree does not divide the query heads",
     "After the all-to-all every rank holds whole heads, so P divides Hq (per tensor rank)."),
    ("SC202", "error", "ulysses: the degree does not fit the KV heads",
     "P divides Hkv, or Hkv divides P (each KV head is then repeated P/Hkv times)."),
    ("SC203", "error", "megatron_sp: the degree does not divide the query heads",
     "Attention is split by heads over the tensor axis."),
    ("SC204", "error", "megatron_sp: the degree does not fit the KV heads",
     "P divides Hkv, or Hkv divides P (K/V weights are then replicated and sliced at use)."),
    ("SC205", "error", "megatron_sp: the degree does not divide the MLP width",
     "The MLP is split by columns over the tensor axis."),
    ("SC206", "error", "the sequence length does not fit the plan",
     "s is divisible by ring*ulysses*tensor; for zigzag by ring*lcm(2, ulysses*tensor)."),
    ("SC207", "warning", "contiguous layout under causal attention is unbalanced",
     "The last ring rank does 2r-1 times the work of the first; zigzag is exactly balanced."),
    ("SC208", "note", "a balanced layout brings nothing here",
     ("Zigzag and striped balance causal work; without causal masks results stay exact, and "
      "nothing is gained.")),
    ("SC209", "note", "no attention was found in the model",
     "Ring and ulysses act at attention only; everything else is sharded by tokens."),
    ("SC210", "error", "the plan puts two placements on one parameter",
     "Tied modules share one parameter, so they share its placement."),
    ("SC211", "error", "calls need different cuts of the same weights",
     "megatron_sp and fsdp divide parameters once, as the first captured call uses them."),
    ("SC212", "error", "padding: pad cannot serve this",
     "Only what has a rule for padded tokens runs on them."),
    ("SC213", "error", "fsdp cannot shard a block of several dtypes",
     "The trained parameters of a block are gathered and summed as one, in one dtype."),
    ("SC214", "error", "fsdp cannot shard a parameter without dims",
     "FSDP2 cuts a dim of every parameter, and a single number has none."),
    # --- capture --------------------------------------------------------------------------
    ("SC301", "error", "the model cannot be captured",
     "torch.export could not turn the model's forward into one graph."),
    ("SC302", "error", "an operation has no rule",
     "It mixes the sharded sequence and must be neither run locally nor guessed."),
    ("SC303", "error", "an attention mask cannot be represented",
     "The strategy needs a mask it can evaluate per block on global positions."),
    ("SC304", "error", "dropout inside attention is not supported here",
     "Masks are keyed by sample, head, query and key: attention has these four dims."),
    ("SC305", "error", "a KV cache is not supported under this plan",
     "Compiled calls are stateless: pass use_cache=False."),
    ("SC306", "error", "forward hooks are not captured",
     "Hooks registered before compilation would be lost; register them afterwards."),
    ("SC307", "error", "the forward changes a buffer",
     "Its value would differ between ranks."),
    ("SC308", "error", "the forward uses random numbers in an unsupported place",
     "Ranks would draw different numbers for one value, or the same for different ones."),
    ("SC309", "error", "an example call is needed",
     "The model's signature is not known; pass example_inputs (dict = kwargs, tuple = args)."),
    ("SC310", "note", "a cache that the model makes by default is not made",
     "Compiled calls return no past_key_values."),
    ("SC311", "error", "a size or branch depends on the values of a tensor",
     "Ranks could then run different programs; shapes may depend on input shapes alone."),
    ("SC312", "error", "seqcomp itself failed while compiling",
     "A fault of the compiler, not of the model; no collective was started."),
    ("SC313", "error", "a module cannot run as one unit",
     "What it returns for how many tokens must be found without tracing it."),
    ("SC314", "error", "a module that runs as one unit has no tokens to share out",
     "It runs on this rank's tokens: they come in with its arguments, and all results have them."),
    ("SC315", "error", "a recurrence over the sequence cannot be divided",
     "Each token needs the state after all tokens before it: the module runs on the whole."),
    ("SC316", "error", "the model has no one sequence to divide",
     "Its attention runs over windows of a sample, or over stages of other lengths."),
    # --- placement findings ---------------------------------------------------------------
    ("SC401", "warning", "an operation made a gather of the sequence necessary",
     "It mixes the sharded dimension and has no cheaper exact form."),
    ("SC402", "note", "work is repeated on every rank",
     "The operation runs on the whole value on all ranks of an axis."),
    ("SC403", "note", "KV heads are replicated",
     "The degree exceeds the KV heads: each is sent to several ranks."),
    ("SC404", "warning", "a full output is larger than 1 GiB",
     "Ask for `outputs: {name: sharded}` or `drop` if the whole value is not needed."),
    ("SC405", "note", "a weight is not cut by megatron_sp",
     "It has no column- or row-parallel partner: it stays whole, its work is cut by tokens."),
    ("SC406", "note", "a weight is whole, and cut where it is used",
     "No one cut of it suits its uses: work and traffic are divided, its memory is not."),
    ("SC407", "note", "an attention mask is held whole",
     "It is not made of vectors over the tokens: every rank holds all pairs."),
    ("SC408", "note", "an operation along the sequence runs on its parts",
     "Neighbouring tokens, totals or single tokens travel instead of the whole sequence."),
    ("SC409", "note", "modules run as one unit on each rank's tokens",
     "Their own code, which depends on where tokens are routed, runs untraced."),
    ("SC411", "note", "heads are padded for ulysses",
     "The degree does not divide them: ranks compute heads of zeros, or share KV heads unevenly."),
    ("SC412", "note", "the sequence is padded",
     "Ranks compute tokens that are removed from outputs and losses."),
    ("SC413", "warning", "attention with dropout runs without a fused kernel",
     "One mask for all ranks is a hash of places in the whole, which plain operations compute."),
    ("SC415", "note", "a block is not checkpointed",
     "Values enter or leave it in the middle of its call, so it is no single call to run again."),
    ("SC416", "note", "memory.offload changes nothing here",
     "The values are in host memory already."),
    ("SC417", "note", "an estimate takes no account of a part of the plan",
     "Its time and bytes are those without it."),
    ("SC418", "warning", "attention's work is shared out unevenly",
     "The masks leave one rank of the ring with more pairs than the others, which wait for it."),
    ("SC419", "note", "the dtype is the machine's",
     "None was asked for: it is the one in which the machine's kernels were measured."),
    ("SC421", "note", "what the times leave out",
     "The cost model knows one job on one cluster with two kinds of links."),
    ("SC422", "note", "what was not tried",
     "The search chooses degrees, order, layout, transport, sharding, checkpoints and chunks."),
    ("SC423", "note", "other plans are as good",
     "Their times differ by less than the cost model is exact."),
    ("SC424", "note", "the best plan nearly fills the memory",
     "What is not counted may be more than what is left."),
    ("SC425", "note", "windows are masks of all pairs here",
     "One device has no other way to say them; tiles know which keys a query sees."),
    ("SC427", "note", "the length of an encoder's sequence is assumed",
     "An estimate is told of one length."),
    # --- calls and ranks ------------------------------------------------------------------
    ("SC501", "error", "an argument is missing", "The model's forward requires it."),
    ("SC502", "error", "an unknown argument", "The model's forward does not take it."),
    ("SC503", "error", "an argument has a wrong shape or length",
     "Every rank of a sequence group passes the same full inputs."),
    ("SC504", "error", "the ranks disagree",
     "All ranks of a sequence group call with the same shapes, dtypes and None-pattern."),
    ("SC505", "error", "another rank failed",
     "Its error is shown; no collective of the model was started."),
    ("SC506", "error", "the weights differ between ranks",
     "Replicated parameters must be equal before compilation; load or broadcast them first."),
    ("SC507", "error", "the parameters have no values yet",
     "A model on meta can be divided, but it must be filled before it is called."),
    # --- not available yet ----------------------------------------------------------------
    ("SC921", "error", "models of this kind are not available here",
     "The library that defines them is not installed, or its support is not built yet."),
)  # fmt: skip


def _table(rows: tuple[tuple[str, Severity, str, str], ...]) -> Mapping[str, CodeInfo]:
    table = {row[0]: CodeInfo(*row) for row in rows}
    assert len(table) == len(rows), "a code is listed twice"
    return MappingProxyType(table)


CODES: Mapping[str, CodeInfo] = _table(_ROWS)
"""Every code, immutable: code -> severity, title, explanation."""
