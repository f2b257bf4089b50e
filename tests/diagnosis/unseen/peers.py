"""Judge the later set with other tools: ``python -m tests.diagnosis.unseen.peers [NAME…]``.

The tools are no requirement of the tests; install them anywhere with ``pip install --no-deps --target`` and add the folders
to ``PYTHONPATH``: torchtest2 0.1.0, torch-audit 0.3.0, torchmortem 0.1.1, training-doctor 0.1.0 and torchtest 0.5.
Each tool is used as its own documentation shows; its informative messages are left out, as are those about speed.
"""

import contextlib
import importlib
import io
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.diagnosis.unseen import Case, cases

RESULTS = Path(__file__).parent / "peers.json"
ABOUT_SPEED = ("TA200", "TA201", "TA400")


def torchtest2(case: Case) -> list[str]:
    program = case.build()
    inputs, labels = next(iter(program.loader))
    options = {"loss_fn": program.loss, "optimizer": program.optimizer}
    arguments = (program.model, inputs, labels) if program.loss else (program.model, inputs)
    report = importlib.import_module("torchtest2").check_model(*arguments, **options if program.loss else {})
    return [f"{r.name}: {r.message}" for r in report.results if r.status.value in ("WARN", "FAIL")]


def torch_audit(case: Case) -> list[str]:
    program = case.build()
    options = {"every_n_steps": 1, "reporters": [], "run_static": True, "run_init": True}
    auditor = importlib.import_module("torch_audit").autopatch(program.model, optimizer=program.optimizer, **options)
    try:
        program.loop(program)
    finally:
        found = auditor.finish(report=False).findings
        auditor.unpatch()
    loud = [f for f in found if f.severity.value != "INFO" and f.rule_id not in ABOUT_SPEED]
    first = {(f.rule_id, f.module_path): f.message for f in reversed(loud)}
    return [f"{rule} {module}: {message}" for (rule, module), message in first.items()]


@contextlib.contextmanager
def each_step(program, call):
    """Call `call` with the last loss after each step of the program's optimizer."""
    last, inner = [], program.loss

    def loss(outputs, labels):
        value = inner(outputs, labels)
        last[:] = [value.item()]
        return value

    if inner:
        program.loss = loss
    handle = register_optimizer_step_post_hook(
        lambda optimizer, _, __: call(*last) if optimizer is program.optimizer else None
    )
    try:
        yield
    finally:
        handle.remove()


def torchmortem(case: Case) -> list[str]:
    program = case.build()
    autopsy = importlib.import_module("torchmortem").Autopsy(
        program.model, optimizer=program.optimizer, sampling="thorough"
    )
    with autopsy, each_step(program, lambda *loss: autopsy.step(**({"loss": loss[0]} if loss else {}))):
        program.loop(program)
    findings = autopsy.get_report().findings
    return [f"{f.category} {', '.join(f.affected_layers)}: {f.summary}" for f in findings if f.severity.name != "INFO"]


def training_doctor(case: Case) -> list[str]:
    program = case.build()
    doctor, steps = importlib.import_module("training_doctor").Doctor(), []
    doctor.set_auto_print(False)

    def log(*loss):
        slopes = [p.grad.norm() for p in program.model.parameters() if p.grad is not None]
        norm = torch.stack(slopes).norm().item() if slopes else 0.0
        if loss:
            doctor.log(step=len(steps), loss=loss[0], lr=program.optimizer.param_groups[0]["lr"], grad_norm=norm)
            steps.append(loss)

    with each_step(program, log):
        program.loop(program)
    return [f"{d.problem}: {d.explanation}" for d in [*doctor.analyze(), *doctor.diagnoses]]


def torchtest(case: Case) -> list[str]:
    program = case.build()
    tests = importlib.import_module("torchtest.torchtest")
    if program.loss is None:
        return []
    try:
        tests.assert_vars_change(program.model, program.loss, program.optimizer, next(iter(program.loader)), "cpu")
    except tests.VariablesChangeException as error:
        return [str(error)]
    return []


TOOLS = (torchtest2, torch_audit, torchmortem, training_doctor, torchtest)


def found(tool, case: Case) -> list[str]:
    """Return up to eight texts of a tool, or that it stopped."""
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            texts = tool(case)
    except Exception as error:  # a tool that stops is a result
        texts = [f"stopped: {type(error).__name__}: {error}"]
    return [text[:160] for text in dict.fromkeys(texts)][:8]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() and names else {}
    for name, case in cases("later").items():
        if not names or name in names:
            results[name] = {tool.__name__: found(tool, case) for tool in TOOLS}
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(result)}" for key, result in results.items())
            RESULTS.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
