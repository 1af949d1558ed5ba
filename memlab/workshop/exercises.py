"""The exercises of each chapter, apart from the notebooks, so that nobody reads a solution by accident."""

from __future__ import annotations

from typing import Any

from memlab.errors import PlanError
from memlab.plan import Offloaded, OptimizerChoice, Plan, Precision
from memlab.workshop.questions import Check, Question, choice, function, number


def chapter(number: int) -> Check:
    """The exercises of a chapter.

    Raises:
        PlanError: there is no such chapter, or it has no exercises.

    Example:
        >>> sorted(chapter(1).questions)[0]
        'q1'
    """
    if number not in QUESTIONS:
        raise PlanError(f"chapter {number!r}: the chapters with exercises are {', '.join(map(str, QUESTIONS))}")
    return Check(QUESTIONS[number])


def _fault_of_flags(given: Any) -> str | None:
    """Return what is wrong with the flags of a plan that is to lower activations and moments and keep every number's format."""
    if not isinstance(given, str):
        return f"{given!r} are no flags: write them as a text, such as '--accumulate 4'."
    plan = Plan.parse(given)
    offloaded = {what for what, _ in plan.offload}
    if plan.precision is not Precision.KEEP or plan.optimizer is not OptimizerChoice.KEEP:
        return "It changes number formats, or the algorithm."
    if plan.accumulation == 1 and plan.checkpointing == "off" and Offloaded.ACTIVATIONS not in offloaded:
        return "Nothing in it lowers the activations."
    if Offloaded.OPTIMIZER not in offloaded:
        return "Nothing in it lowers the optimizer state."
    return None


QUESTIONS: dict[int, tuple[Question, ...]] = {
    # Make it fit
    0: (
        Question(
            "q1", choice("ABC", "B"),
            "Moments are 8 bytes for each parameter, and about 2 in 8 bits. The other two lower what grows with the batch.",
            "Optimizer state is what AdamW keeps for each parameter, whatever the batch is.",
            "B: --adam8bit, or --offload optimizer",
        ),
        Question(
            "q2", _fault_of_flags,
            "Smaller parts of the batch, recomputation or offload for the activations, and offloaded moments: the numbers stay the same.",
            "Three flags lower activations, each by itself. Of those that lower moments, --adam8bit changes their format; which one only moves them?",
            "--accumulate 4 --offload optimizer (or --checkpoint, or --offload activations,optimizer)",
        ),
        Question(
            "q3", number(12, within=0.0),
            "The optimizer is the same object under every plan, and so it goes on counting.",
            "Was a new optimizer made anywhere?",
            "9 + 3 = 12",
        ),
    ),
    # Where the memory goes
    1: (
        Question(
            "q1", number(16),
            "4 bytes for the parameter, 4 for its gradient, 8 for AdamW's two moments.",
            "At the moment of optimizer.step() four numbers exist for each parameter. How many bytes has a number in fp32?",
            "parameter 4 + gradient 4 + first moment 4 + second moment 4 = 16 bytes",
        ),
        Question(
            "q2", function((((64, 4, 32 * 32 * 3), 64 * 4 * 3072**2 * 4), ((64, 4, 64 * 64 * 3), 64 * 4 * 12288**2 * 4))),
            "9.7 GB for an image of 32 × 32 × 3 values, 154.6 GB for 64 × 64 × 3: four times the tokens, sixteen times the scores.",
            "Every head of every layer has one score for each pair of tokens, and a score takes 4 bytes.",
            "def attention_bytes(layers, heads, tokens):\n    return layers * heads * tokens**2 * 4",
        ),
        Question(
            "q3", choice("ABCD", "C"),
            "Activations are kept for every row; the other three depend on the model alone.",
            "Three of the four are as large as the model, and do not depend on the batch.",
            "C: the activations",
        ),
        Question(
            "q4", choice("ABC", "B"),
            "The update makes moments of all parameters once, and they stay; in the first step they were not there yet when the backward pass peaked.",
            "Which of the parts of the bar does not exist before the first optimizer.step()?",
            "B: AdamW's moments are made in the first optimizer.step(), so only from the second step on they are there during the backward pass",
        ),
    ),
    # Gradient accumulation
    2: (
        Question(
            "q1", number(4),
            "Four micro-batches of 16 rows are a batch of 64.",
            "How many times does 16 go into 64?",
            "64 / 16 = 4, so --accumulate 4",
        ),
        Question(
            "q2", function((((0.9, 30, 1.5, 10), 1.05), ((2.0, 5, 4.0, 15), 3.5), ((1.0, 8, 3.0, 8), 2.0))),
            "A part with three times the targets counts three times.",
            "The loss of the whole batch is the sum over all targets, divided by how many there are. What is the sum over the targets of one part?",
            "def whole_loss(loss_a, targets_a, loss_b, targets_b):\n"
            "    return (loss_a * targets_a + loss_b * targets_b) / (targets_a + targets_b)",
        ),
        Question(
            "q3", choice("ABCD", "C"),
            "The gradients of the parts are added up in one place, which has to stay between them.",
            "One of them is added to from the first part to the last.",
            "C: gradients: the sum has to be kept from one part to the next, and it is as large as the model",
        ),
        Question(
            "q4", number(250),
            "The scheduler goes with the optimizer: once for each step, which is once for four batches.",
            "How often does optimizer.step() run?",
            "1000 batches / 4 batches for each step = 250",
        ),
    ),
    # Checkpointing
    3: (
        Question(
            "q1", number(1 / 3, within=0.02),
            "One more forward pass, on three thirds of work: 4/3.",
            "Call the work of a forward pass 1. What is the step then, and what is added to it?",
            "forward 1 + backward 2 = 3; recomputation adds 1, and 1/3 = 0.33",
        ),
        Question(
            "q2", function((((100,), 10), ((64,), 8), ((50,), 8), ((1,), 1))),
            "Ten segments of ten layers: ten inputs to keep, and ten layers to recompute at a time.",
            "With k segments of n/k layers, k inputs are kept and one segment of n/k layers is recomputed at a time. Which k makes k + n/k smallest?",
            "def segments(layers):\n    return -int(-(layers**0.5) // 1)",
        ),
        Question(
            "q3", choice("ABC", "B"),
            "A mask that is drawn again belongs to another network than the one whose loss was computed.",
            "The recomputation has to give what the forward pass gave, number for number. Which of the three draws numbers?",
            "B: dropout. Its mask has to be drawn from the same random state again (preserve_rng_state=True, the default)",
        ),
        Question(
            "q4", choice("ABC", "A"),
            "Nothing is kept of a block that is recomputed, but the logits belong to no block.",
            "Which of them is computed outside of the repeated blocks?",
            "A: the logits. --chunk-loss or --accumulate lower them",
        ),
    ),
    # Lower precision
    4: (
        Question(
            "q1", number(1.0, within=0.0),
            "bf16 has 8 bits for the fraction, so beside 1 the next number is 1.0078125.",
            "torch.finfo(torch.bfloat16).eps is the distance from 1 to the next number.",
            "1.0: a change of 0.003 is less than half of the distance to the next number, 0.0078",
        ),
        Question(
            "q2", number(8),
            "2 for the parameter, 2 for the gradient, 2 for each of two moments: half of fp32's 16.",
            "The same four numbers as in fp32, each in 16 bits.",
            "2 + 2 + 2 + 2 = 8. (pure-bf16 of memlab spends 2 more on what rounding cut off the weights, so that they return bit for bit)",
        ),
        Question(
            "q3", choice("ABC", "B"),
            "fp16 has 5 bits of exponent where bf16 has the 8 of fp32: small gradients become zero.",
            "Which of the formats has another range than fp32?",
            "B: fp16, whose smallest number is 6e-8",
        ),
        Question(
            "q4", function((((2.0**16 * 0.5, 2.0**16), 0.5), ((3072.0, 1024.0), 3.0))),
            "The gradient of scale × loss is scale × gradient, and a limit of 1.0 is meant for the true one.",
            "The backward pass ran on scale × loss. What is every gradient multiplied by, then?",
            "def true_norm(norm, scale):\n    return norm / scale",
        ),
    ),
    # 8-bit Adam and Adafactor
    5: (
        Question(
            "q1", number(52.2),
            "Eight bytes for each of seven billion parameters, and the parameters themselves are only half of that.",
            "Two numbers of four bytes for each parameter, and a GiB is 2**30 bytes.",
            "7e9 * 8 / 2**30 = 52.2",
        ),
        Question(
            "q2", function((((4096, 4096), 8192), ((50257, 768), 51025), ((10, 1), 11))),
            "One mean for each row and one for each column stand for the whole table.",
            "Adafactor keeps the means of the squares over the rows and over the columns, and multiplies them when it needs the table.",
            "def numbers_kept(rows, columns):\n    return rows + columns",
        ),
        Question(
            "q3", choice("ABC", "C"),
            "Each block of 256 has a scale of its own, so one large value makes only 255 others inexact.",
            "What would one scale for a whole tensor do to its small values, when one value is a thousand times larger?",
            "C: the scale of a block is its own largest value",
        ),
        Question(
            "q4", choice("ABC", "A"),
            "The scheduler was made for the old optimizer and goes on setting the rates of that one.",
            "Which object does scheduler.optimizer point to?",
            "A: the rate stays where it was. memlab changes the update behind the same optimizer object, so the scheduler notices nothing",
        ),
    ),
    # Offload
    6: (
        Question(
            "q1", number(8 / 12e9 * 24e12 / 6),
            "8 bytes a parameter each way at 12 GB/s, against 6 operations a parameter and token at 24 TFLOP/s. The parameters cancel.",
            "Write down both times for one parameter: 8 bytes each way over the link, and 6 operations for each token. Set them equal.",
            "8 / 12e9 = 6 * tokens / 24e12, so tokens = 8 / 12e9 * 24e12 / 6 = 2667",
        ),
        Question(
            "q2", function((((1000,), 16_000), ((124_439_808,), 1_991_036_928), ((7_000_000_000,), 112_000_000_000))),
            "Two moments of four bytes, once in and once out.",
            "How many numbers does AdamW keep for a parameter, of how many bytes, and how often are they copied in a step?",
            "def over_the_link(parameters):\n    return parameters * 2 * 4 * 2",
        ),
        Question(
            "q3", choice("ABC", "B"),
            "Move what is largest at the peak. Activations are freed by then, whatever the batch.",
            "Which of the three is still there when the update runs?",
            "B: --offload optimizer. In the update there are no activations, so A and C lower another peak",
        ),
        Question(
            "q4", choice("ABC", "C"),
            "State moves once for each update, and there are four times as many samples in it.",
            "When is the state needed: in each backward pass, or in each update?",
            "C: a quarter. The same bytes for each update, shared by four times as many samples",
        ),
        Question(
            "q5", choice("ABC", "B"),
            "With assign=True the values that were loaded become the parameters, and only the optimizer still holds the old ones.",
            "Which of them makes new Parameter objects, where the others write into those that are there?",
            "B: assign=True. Make the optimizer after it, or load without it",
        ),
    ),
    # Finding the plan
    7: (
        Question(
            "q1", choice("ABC", "B"),
            "The technique has to lower what is largest at the peak.",
            "Two of the three lower activations only.",
            "B: --adam8bit shrinks the moments to a quarter; --offload optimizer would remove them from the device",
        ),
        Question(
            "q2", number(4, within=0.0),
            "(8, 90) is better than (8, 80), and (6, 60), which is faster and needs less, is better than (7, 55).",
            "For each plan, look for another one that is at least as fast and needs no more. Where there is one, the plan is not on the front.",
            "4: (10, 100), (8, 90), (6, 60) and (4, 30)",
        ),
    ),
    # Keep going
    8: (
        Question(
            "q1", number(2600, within=0.0),
            "600 steps, and then 2,000 of half the size. A schedule made for 1,000 steps ended before the second start was half done.",
            "How many batches of half the size do 1,000 batches make? And what of the steps that were done before?",
            "600 + 2 * 1000 = 2600",
        ),
        Question(
            "q2", choice("ABC", "B"),
            "The failed pass has drawn its dropout masks; continued from there, the second attempt would draw others.",
            "Which of the three does a forward pass change?",
            "B: the random state (and buffers, such as the statistics of BatchNorm). Weights and rates change in the update only",
        ),
        Question(
            "q3", choice("ABC", "B"),
            "When the handler is over, the error goes, and with it its traceback, the frames and the graph they hold.",
            "Where is the error when step(quarter) is called: being handled, kept in a list, or gone?",
            "B: in A the error is still being handled, and emptying a cache frees nothing that is held; in C the list keeps it",
        ),
        Question(
            "q4", function((((4, 1), 4), ((8, 8), 1), ((16, 5), 4), ((12, 4), 4), ((5, 1), 8))),
            "Doubling finds a number of parts in few attempts; each attempt costs a forward pass.",
            "Begin with one part. The largest part of rows in n parts has ceil(rows / n) rows.",
            "def parts(rows, rows_that_fit):\n    n = 1\n    while -(-rows // n) > rows_that_fit:\n        n *= 2\n    return n",
        ),
    ),
    # Beyond one GPU
    9: (
        Question(
            "q1",
            function((((7.5e9, 0, 64), 120e9), ((7.5e9, 1, 64), 31.40625e9), ((7.5e9, 2, 64), 16.640625e9), ((7.5e9, 3, 64), 1.875e9),
                      ((1e9, 3, 1), 16e9))),
            "120, 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 GPUs: the figures of the ZeRO paper.",
            "Each stage divides one more of the three: first the 12 bytes, then the gradients, then the weights.",
            "def bytes_kept(parameters, stage, ranks):\n"
            "    optimizer = 12 / ranks if stage >= 1 else 12\n"
            "    gradients = 2 / ranks if stage >= 2 else 2\n"
            "    weights = 2 / ranks if stage >= 3 else 2\n"
            "    return parameters * (optimizer + gradients + weights)",
        ),
        Question(
            "q2", number(700, within=0.005),
            "A reduce-scatter and an all-gather, each 7/8 of the gradient.",
            "An average is a reduce-scatter and an all-gather. In each of them a rank sends every part but one.",
            "2 * (8 - 1) / 8 * 400 = 700",
        ),
        Question(
            "q3", choice("ABC", "B"),
            "It divides the moments and sends what DDP sends; ZeRO-3 would gather the weights once more.",
            "Which of the three divides moments, and which of those sends less?",
            "B: ZeRO-1. DDP keeps all moments on every rank; ZeRO-3 sends half as much more",
        ),
        Question(
            "q4", choice("ABCD", "D"),
            "All three divide activations only by giving each rank other rows, and there is only one row.",
            "What do they do to the batch? Into how many parts can one row be cut?",
            "D: none. --checkpoint or --offload activations lower them, or parallelism along the sequence, which this course leaves out",
        ),
        Question(
            "q5", choice("ABC", "B"),
            "It prints a whole program in plain PyTorch. DeepSpeed's configuration is for the ZeRO stages, and refuses fsdp2.",
            "%memfit export deepspeed --scale fsdp2 says what it can do.",
            "B: %memfit export fsdp2 --scale fsdp2; export accelerate writes the file for accelerate launch",
        ),
    ),
    # Inference
    10: (
        Question(
            "q1", number(128),
            "131,072 bytes for each token, so 8,192 tokens are a GiB.",
            "2 × layers × key-value heads × head size × bytes of a number; the head size is 4096 / 32.",
            "2 * 32 * 8 * 128 * 2 / 1024 = 128",
        ),
        Question(
            "q2", function((((24, 16, 1, 2), 4), ((40 * 2**30, 15 * 2**30, 2**17, 8192), 25), ((100, 10, 7, 4), 3))),
            "The weights are there once, the cache once for each row.",
            "What do the weights leave, and how much of it does one row take? Half a row is none.",
            "def rows_that_fit(budget, weights, bytes_per_token, tokens):\n"
            "    return (budget - weights) // (bytes_per_token * tokens)",
        ),
        Question(
            "q3", choice("ABC", "B"),
            "A number has no graph. Better still is torch.no_grad(), under which no graph is made at all.",
            "What does a loss keep in memory that was computed with gradients on?",
            "B: output.loss.item(); the tensor kept the graph of its whole forward pass, and eval() does not switch that off",
        ),
        Question(
            "q4", number(15.625),
            "128,000 × 128 KiB: as much as the weights, for one user.",
            "You know what one token takes from q1.",
            "128_000 * 131_072 / 2**30 = 15.6",
        ),
        Question(
            "q5", choice("ABC", "C"),
            "Two bytes for each number in place of four; the other factors belong to the model and to the text.",
            "Look for a factor of the formula.",
            "C: bf16. Query heads are not in the formula, and logits are no keys",
        ),
    ),
    # Your own model
    11: (
        Question(
            "q1", choice("ABC", "C"),
            "The other two lower activations, which are not the largest part.",
            "Which of the three moves what the receipt names?",
            "C: --offload optimizer; --adam8bit and --optim adafactor lower the same part",
        ),
        Question(
            "q2",
            function(((([90, 60, 30], [10.0, 9.0, 6.0], 64), 1), (([90, 60, 30], [10.0, 6.0, 9.0], 64), 2),
                      (([90, 60], [10.0, 9.0], 90), 0), (([90, 60], [10.0, 9.0], 50), -1))),
            "First what fits, then what is fast.",
            "Two conditions, in an order: what does not fit has no speed.",
            "def fastest_that_fits(peaks, speeds, budget):\n"
            "    fitting = [at for at, peak in enumerate(peaks) if peak <= budget]\n"
            "    return max(fitting, key=lambda at: speeds[at], default=-1)",
        ),
        Question(
            "q3", number(250),
            "It shows 128 KiB and holds all 64,000 rows.",
            "A slice is a view. Whose memory is it?",
            "64_000 * 4 / 1024 = 250; data[:32].clone() holds 0.125",
        ),
        Question(
            "q4", choice("ABC", "B"),
            "What is still referred to is not freed. sys.last_value, IPython's own copy of the traceback and the last result all refer to it.",
            "Where does %debug read the variables of a function that is long over?",
            "B: the traceback refers to frames, frames to variables, variables to tensors and graphs",
        ),
        Question(
            "q5", choice("ABC", "B"),
            "Exact, within a tolerance and another algorithm are three different promises; each technique says which one it makes.",
            "Which of the two techniques changes the numbers that an update is made from?",
            "B: each technique is held to its own promise",
        ),
    ),
    # It fits, and fails later
    12: (
        Question(
            "q1", number(3.0),
            "Reserved less allocated is what the allocator holds and nobody uses: 3 GiB, if the pieces fit the requests.",
            "Which of the three numbers is what PyTorch holds already, and which is what tensors use of it?",
            "11.0 reserved - 8.0 allocated = 3.0; the other 0.5 GiB of the process are CUDA's context",
        ),
        Question(
            "q2", function((((1, 5), 8), ((4, 0), 12), ((500, 1300), 2800))),
            "The weights, two moments of the same size from the first step, and the activations. In the first step it was one of these three less.",
            "What did the first step leave behind that was not there in its own forward pass?",
            "def second_step(weights, activations):\n    return weights + 2 * weights + activations",
        ),
        Question(
            "q3", choice("ABC", "C"),
            "The peak of a run is that of its worst batch.",
            "What ends the run, when one batch of a thousand does not fit?",
            "C: the longest that can occur. Predictions and searches take its shape",
        ),
    ),
    # Adapters
    13: (
        Question(
            "q1", function((((4096, 4096, 16), 131072), ((768, 3072, 8), 30720), ((1, 1, 1), 2))),
            "Two matrices: inputs × rank and rank × outputs.",
            "How many numbers have the two matrices, one after the other?",
            "def adapter(inputs, outputs, rank):\n    return rank * (inputs + outputs)",
        ),
        Question(
            "q2", number(14.64, within=0.01),
            "14 GB of weights that wait, and 16 bytes for each parameter that learns: 0.64 GB.",
            "Weights that wait have no gradient and no moments. What has each parameter of the adapters?",
            "7e9 * 2 + 40e6 * (4 + 4 + 8) = 14.64e9",
        ),
        Question(
            "q3", choice("ABC", "C"),
            "Adapters lower gradients and optimizer state; activations stay.",
            "Which of the three lowers what grows with the batch?",
            "C: --checkpoint. Adapters lower gradients and moments",
        ),
        Question(
            "q4", choice("ABC", "B"),
            "Merging adds what was learnt to the weights. The other two leave them as they were before the adapters came.",
            "Which of the three writes to a weight?",
            "B: --lora off:merge",
        ),
    ),
    # Evaluating and saving
    14: (
        Question(
            "q1", function((((8, 1024, 128_000), 4_194_304_000), ((1, 1, 2), 8), ((32, 512, 50_000), 3_276_800_000))),
            "4.2 GB for eight rows of 1,024 tokens and 128,000 words.",
            "Each token of each row has one number for each word.",
            "def logits_bytes(rows, tokens, vocabulary):\n    return rows * tokens * vocabulary * 4",
        ),
        Question(
            "q2", choice("ABC", "B"),
            "A detached tensor is its number alone. item() is that too, and waits for the device.",
            "Which of the three is a tensor without a history?",
            "B: total += loss.detach()",
        ),
        Question(
            "q3", number(10),
            "A state dict holds the model's own tensors, and these go on training.",
            "Does state_dict() copy?",
            "10: best is the model. copy.deepcopy(model.state_dict()) would be that of epoch 3",
        ),
        Question(
            "q4", number(36, within=0.01),
            "Weights and two moments, 4 bytes each. Gradients are not saved.",
            "What of the 16 bytes for each parameter must be there when the run goes on?",
            "3e9 * (4 + 8) = 36e9",
        ),
    ),
}  # fmt: skip
