"""The mistakes that checks before the first step find, and those that they share with rules.

A mistake is declared once.  Each evidence, a check before the first step or a rule, refers to it and has its own threshold.
A mistake with a single rule as its evidence is declared by the attributes of that rule.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

from ikkuna.errors import ConfigError, unknown_name
from ikkuna.store.finding import SEVERITIES, Finding


@dataclass(frozen=True)
class Mistake:
    """A mistake of a training, with the texts and the severity of its findings.

    Parameters
    ----------
    name : str
        The name of the mistake.
    severity : {'info', 'warning', 'error'}
        The severity of its findings.
    severity_while_falling : {'info', 'warning', 'error'}
        The highest severity of its findings while the loss falls, see `ikkuna.diagnosis.Rule`.
    meaning : str
        What a finding means, in a sentence; ``{figure}`` is replaced.
    advice : str
        What to try.
    explains : frozenset of str
        The mistakes that are consequences of this one.
    of_minimum : bool
        Whether it is no mistake if an optimizer maximises the loss.

    Raises
    ------
    ConfigError
        If a severity is unknown.

    Examples
    --------
    >>> large = Mistake("large", meaning="The loss is {figure:.2g}.", advice="use a mean")
    >>> print(large.found(12.3, detail="A guess has 2.", at_most="info"))
    info: large: The loss is 12. A guess has 2.
    """

    name: str
    severity: str = "warning"
    severity_while_falling: str = "error"
    _: KW_ONLY
    meaning: str
    advice: str
    explains: frozenset[str] = frozenset()
    of_minimum: bool = False

    def __post_init__(self) -> None:
        if unknown := {self.severity, self.severity_while_falling}.difference(SEVERITIES):
            raise ConfigError(f"{self.name}: {unknown_name('severity', min(unknown), SEVERITIES)}")

    def found(
        self,
        figure: float | None = None,
        module: str | None = None,
        *,
        detail: str = "",
        at_most: str = "error",
        advice: str = "",
        evidence: tuple[tuple[int | str, float], ...] = (),
        modules: tuple[str, ...] = (),
    ) -> Finding:
        """Return a finding of this mistake before the first step.

        Parameters
        ----------
        figure : float, optional
            The figure that shows the mistake.
        module : str, optional
            The name of the module; ``None`` for the network.
        detail : str
            Further sentences of this evidence.
        at_most : {'info', 'warning', 'error'}
            The highest severity that this evidence justifies.
        advice : str
            What to try, if this evidence shows which of several causes the mistake has.
        evidence : tuple of (object, float)
            The series behind the figure.
        modules : tuple of str
            Every module with the mistake, if there are several.
        """
        meaning = self.meaning.format(figure=figure, module=module)
        return Finding(
            self.name,
            min(self.severity, at_most, key=SEVERITIES.index),
            f"{meaning} {detail}".strip(),
            module,
            value=figure,
            advice=advice or self.advice,
            evidence=evidence,
            modules=modules,
        )


def names(text: str) -> frozenset[str]:
    """Return the names of mistakes in a text, which are separated by spaces."""
    return frozenset(text.split())


# -- the program ------------------------------------------------------------------------------------------------------

ENDED_BY_EXCEPTION = Mistake(
    "ended_by_exception",
    "error",
    meaning="The program ended with an exception.",
    advice="'ikkuna replay DUMP' shows the batch of the last step that was kept",
)

# -- the optimizer ----------------------------------------------------------------------------------------------------

MISSING_STEP = Mistake(
    "missing_step",
    "error",
    meaning="{figure:.0f} forwards in training were followed by no step of an optimizer that owns parameters of the model, "
    "so nothing is measured.",
    advice="call optimizer.step() after backward(); if no optimizer of torch.optim updates the model, call step() of the monitor after "
    "each step; if only a part of the model was added, set the whole model with set_model()",
    explains=names("no_learning lr_too_low plateau never_moves not_in_optimizer"),
)
NO_BATCH = Mistake(
    "no_batch",
    meaning="No batch has reached the model: the program has ended without a forward, although an optimizer has its parameters.",
    advice="check the number of batches, len(loader): incomplete ones are left out with drop_last=True, and the loop ends early if another "
    "iterator is at its end",
)
STEPS_LEFT_OUT = Mistake(
    "steps_left_out",
    meaning="The gradients of at least {figure:.0f} backward passes were cleared before a step, with the same weights: they had no effect.",
    advice="call optimizer.step() after each backward(), not in a condition; to accumulate gradients, clear them after the step only",
    explains=names("no_learning lr_too_low plateau"),
)
NOT_IN_OPTIMIZER = Mistake(
    "not_in_optimizer",
    "error",
    "warning",
    meaning="No optimizer owns this parameter, so it is not trained, and optimizer.zero_grad() does not clear its gradients.",
    advice="pass it to the optimizer, or call requires_grad_(False) if it is meant to stay as it is",
    explains=names("no_learning lr_too_low plateau"),
)
UNREGISTERED_PARAMETERS = Mistake(
    "unregistered_parameters",
    "error",
    meaning="The output depends on {figure:.0f} parameters that are not registered in the model, so model.parameters() misses them.",
    advice="keep modules in nn.ModuleList or nn.ModuleDict, and parameters in nn.ParameterList, in place of lists and dictionaries",
    explains=names("no_learning lr_too_low plateau"),
)
FROZEN_IN_OPTIMIZER = Mistake(
    "frozen_in_optimizer",
    "info",
    meaning="An optimizer owns frozen parameters, which will not change.",
    advice="if they should train, call requires_grad_(True)",
)
FROZEN_OUTPUT_LAYER = Mistake(
    "frozen_output_layer",
    meaning="The output layer is frozen, and its weights are those that its constructor made: no training has reached them.",
    advice="call requires_grad_(True) on the output layer after everything else was frozen, and before the optimizer is created",
    explains=names("no_learning plateau lr_too_low class_collapse"),
)
PARAMETER_IN_TWO_GROUPS = Mistake(
    "parameter_in_two_groups",
    meaning="Parameters are in several parameter groups or optimizers.",
    advice="put each parameter into one group, so that it is updated once a step",
)
STEP_REPEATED = Mistake(
    "step_repeated",
    meaning="The optimizer steps again with the gradients that its step before has used.",
    advice="call optimizer.step() once for each backward(), and clear the gradients behind it",
)
CHANGED_AFTER_STEP = Mistake(
    "changed_after_step",
    meaning="Gradients are clipped or scaled down after the step, and cleared before another one can use them: that has no effect.",
    advice="call clip_grad_norm_() or clip_grad_value_() between backward() and optimizer.step()",
)
WEIGHTS_RESTORED = Mistake(
    "weights_restored",
    "error",
    meaning="The weights have returned to exactly those of step {figure:.0f}: what was learned since is lost, again and again.",
    advice="search for load_state_dict(), a copy of the weights or a new model inside the loop",
    explains=names("no_learning plateau loss_spike lr_too_low"),
)
SCHEDULED_IN_VAIN = Mistake(
    "scheduled_in_vain",
    meaning="A scheduler changes the learning rate of an optimizer that has made no step; another one, whose rate stays as it is, has made "
    "the steps.",
    advice="create the scheduler with the optimizer whose step() is called, after that optimizer was created for the last time",
)
LEARNING_RATE_ZERO = Mistake(
    "learning_rate_zero",
    "error",
    meaning="The learning rate of a parameter group is 0.",
    advice="set a learning rate, or freeze the parameters",
)

# -- the model --------------------------------------------------------------------------------------------------------

EVALUATION_MODE = Mistake(
    "evaluation_mode",
    "error",
    "warning",
    meaning="Modules are in evaluation mode while they train: dropout is off, and batch norm uses its running statistics.",
    advice="call model.train() before training and after each evaluation, or freeze the parameters of these modules",
    explains=names("overfit loss_spike"),
)
UNTIED_WEIGHTS = Mistake(
    "untied_weights",
    "error",
    "warning",
    meaning="The weight of this layer is not the tensor of the embedding's weight, although both were tied.",
    advice="assign the weight of the embedding to this layer again after the model has been copied or loaded, before the optimizer "
    "is created (in transformers: model.tie_weights())",
    explains=names("not_in_optimizer never_moves no_gradient"),
)
IDENTICAL_UNITS = Mistake(
    "identical_units",
    "error",
    meaning="All units of this layer have the same weights, so they will stay equal.",
    advice="initialise the weights at random",
    explains=names("signal_lost vanishing_gradient exploding_gradient"),
)
NONFINITE = Mistake(
    "nonfinite",
    "error",
    meaning="A value is NaN or infinite.",
    advice="look for log(0), 0/0 and overflow here, check the data, lower the learning rate or clip gradients; "
    "NonFiniteSubscriber() names the operation",
    explains=names(
        "diverges no_learning loss_spike dead_units ignores_input class_collapse zero_gradient never_moves plateau saturated "
        "vanishing_gradient gradient_spike gradient_jump lost_updates softmax_twice"
    ),
)
DEAD_UNITS = Mistake(
    "dead_units",
    "error",
    "info",
    meaning="{figure:.0%} of the units of this layer are inactive for every sample.",
    advice="lower the learning rate, check the bias and the initialisation of the layer before it and products with zero, or use a leaky "
    "rectifier",
    explains=names(
        "signal_lost ignores_input no_learning lr_too_low signal_scale vanishing_gradient zero_gradient class_collapse rank_collapse "
        "plateau never_moves update_ratio"
    ),
)
ZERO_GRADIENT = Mistake(
    "zero_gradient",
    "error",
    "warning",
    meaning="The gradient of the weight is exactly zero, while other parameters receive one.",
    advice="look at its inputs, which are zero if the units of the layer before it are dead, "
    "and at what uses its output: a product with zero, or a branch that the loss does not use",
    explains=names(
        "signal_lost no_learning lr_too_low ignores_input never_moves rank_collapse plateau vanishing_gradient"
    ),
)
SIGNAL_LOST = Mistake(
    "signal_lost",
    "error",
    "info",
    meaning="Before the first update the outputs are the same for every sample; the share of their energy that differs is {figure:.2g}.",
    advice="use larger initial weights, residual connections or a normalisation; look for a layer whose outputs are constant, as with a "
    "very negative bias or a product with zero",
    explains=names(
        "ignores_input vanishing_gradient no_learning lr_too_low lr_too_high saturated class_collapse rank_collapse plateau "
        "gradient_spike gradient_jump update_ratio"
    ),
)
SIGNAL_SCALE = Mistake(
    "signal_scale",
    "warning",
    "info",
    meaning="Before the first update the outputs of this layer have a scale of {figure:.3g}.",
    advice="use smaller initial weights, a normalisation, or normalised inputs",
    explains=names(
        "signal_lost logit_growth loss_at_init lr_too_high exploding_gradient vanishing_gradient no_learning diverges dead_units "
        "loss_spike ignores_input nonfinite saturated class_collapse update_ratio rank_collapse plateau zero_gradient"
    ),
)
IGNORES_INPUT = Mistake(
    "ignores_input",
    "error",
    "info",
    meaning="The outputs are the same for every sample; only {figure:.2g} of their energy differs.",
    advice="search for a branch that is multiplied by zero, dead layers, or inputs that are constant or not used",
    explains=names("class_collapse no_learning rank_collapse plateau lr_too_low"),
)
BATCH_LEAK = Mistake(
    "batch_leak",
    "error",
    meaning="In evaluation mode the output of a sample depends on other samples of the batch (relative change {figure:.1g}).",
    advice="look for a reduction, softmax, normalisation or reshape over the axis of samples",
)
BATCH_POSITION = Mistake(
    "batch_position",
    "error",
    meaning="In evaluation mode the output of a sample depends on its position in the batch (relative change {figure:.1g}).",
    advice="look for positions or other tensors that are added along the axis of samples, and for a reshape over it",
)
LABEL_OFFSET = Mistake(
    "label_offset",
    "error",
    meaning="The output at a position is trained with the input {figure:+g} positions away; the next one is +1.",
    advice="shift the labels by one position, and shift them once only",
)
ONE_INDEX = Mistake(
    "one_index",
    "error",
    meaning="The embedding gets the index {figure:g} for every sample, although the numbers that were converted to indices differ.",
    advice="convert the numbers before they are scaled: the conversion to integers removes everything behind the point",
    explains=names("ignores_input no_learning plateau zero_gradient never_moves"),
)
PADDING_INSIDE = Mistake(
    "padding_inside",
    meaning="The padding index of this embedding stands between other tokens in {figure:.0%} of the sequences; its row is never trained.",
    advice="use an index that is no word as padding_idx",
)
RUNNING_STATISTICS_FIXED = Mistake(
    "running_statistics_fixed",
    meaning="The momentum of this normalisation is 0: its running statistics stay as they are, and evaluation mode uses them.",
    advice="use a momentum above 0, such as 0.1; PyTorch multiplies the new statistics by it",
    explains=names("running_statistics"),
)
STATISTICS_OF_LAST_BATCHES = Mistake(
    "statistics_of_last_batches",
    meaning="The momentum of this normalisation is {figure:g}: its running statistics, for evaluation mode, are those of the last batches.",
    advice="use a momentum such as 0.1; PyTorch multiplies the new statistics by it, so that 0.99 of other libraries is 0.01 here",
    explains=names("running_statistics"),
)
PADDING_CHANGES_OUTPUT = Mistake(
    "padding_changes_output",
    meaning="The output changes with the amount of padding (relative change {figure:.1g}).",
    advice="use the mask or the lengths in attention, recurrent layers and pooling",
)
INPLACE_CHANGES_OUTPUT = Mistake(
    "inplace_changes_output",
    meaning="The output is another one if this module does not work in place (relative change {figure:.1g}).",
    advice="set inplace=False, because another part of the model uses the same tensor",
)
NO_ACTIVATION = Mistake(
    "no_activation",
    meaning="The output is a linear function of the inputs, although several layers with weights follow each other.",
    advice="put an activation function between the layers",
)
ONE_LABEL = Mistake(
    "one_label",
    "warning",
    "warning",
    meaning="Every label that was read is {figure:g}: there is nothing to distinguish.",
    advice="check how the labels are made, loaded and converted, as floating-point numbers to integers, and whether the data have "
    "examples of other labels",
    explains=names("lost_updates logit_growth repeated_batch ignores_input no_learning class_collapse not_shuffled"),
)
CONSTANT_RESULT = Mistake(
    "constant_result",
    meaning="An operation has the same result for every input, so that it passes no gradient.",
    advice="check the axis and the shape of its input; a single score needs a sigmoid in place of a softmax",
    explains=names(
        "zero_gradient signal_lost ignores_input no_learning plateau never_moves vanishing_gradient labels_out_of_reach all_gradients_zero"
    ),
)
SAME_SIDES = Mistake(
    "same_sides",
    meaning="The difference in a log-sigmoid is exactly 0 for every pair, also after an update: its two sides are the same.",
    advice="compute the side of the reference with a frozen copy of the model, made before training; the answers of a pair must differ",
    explains=names("no_learning plateau"),
)
SOFTMAX_AXIS = Mistake(
    "softmax_axis",
    meaning="The softmax of an attention is over another axis than that of the keys, so that the weights of a query do not have the sum 1.",
    advice="apply the softmax along the last axis of the scores, dim=-1; without dim it is not the last one",
    explains=names("batch_leak no_activation no_learning plateau"),
)
MASK_AS_INDEX = Mistake(
    "mask_as_index",
    "error",
    meaning="A mask of 0 and 1 is used as indices, which choose the rows 0 and 1 again and again.",
    advice="convert the mask to torch.bool before it chooses rows",
    explains=names("labels_without_gradient no_learning plateau class_collapse"),
)
TRIVIAL_OPTIMUM = Mistake(
    "trivial_optimum",
    meaning="The loss is least if the network returns the same for every input: all that it does is to draw outputs together.",
    advice="stop the gradient of one of the two, or add negatives or a term for the variance of outputs",
    explains=names("rank_collapse ignores_input signal_lost class_collapse plateau vanishing_gradient zero_gradient"),
)
ENTROPY_PUNISHED = Mistake(
    "entropy_punished",
    meaning="Beside rewards of both signs the loss has the entropy of probabilities with a factor of {figure:.2g}: "
    "it makes actions certain.",
    advice="subtract the entropy from the loss, so that it is a bonus",
    explains=names("class_collapse logit_growth plateau"),
)
CODES_ACROSS_SAMPLES = Mistake(
    "codes_across_samples",
    "error",
    meaning="The similarities are those of codes whose length is 1 along the samples, and not each by itself.",
    advice="normalise each code along its features: functional.normalize(codes, dim=-1)",
    explains=names("no_learning plateau loss_floor"),
)
OWN_CANDIDATE = Mistake(
    "own_candidate",
    meaning="Each row is among the candidates to which it is compared, has the largest similarity with itself ({figure:.0%} of the "
    "probability), and is never the right one.",
    advice="fill the diagonal of the similarities with a large negative number before the softmax",
    explains=names("no_learning plateau"),
)
VIEWED_AXES = Mistake(
    "viewed_axes",
    "error",
    meaning="A view has exchanged two axes without moving the elements: values of several positions are mixed.",
    advice="use transpose or permute in place of view or reshape",
    explains=names("no_learning plateau class_collapse wrong_optimum labels_of_other_samples time_leak"),
)
PADDING_IN_LOSS = Mistake(
    "padding_in_loss",
    meaning="{figure:.0%} of the positions that the loss counts are padding at the ends of sequences.",
    advice="set these labels to the ignore_index of the loss, or multiply the loss of each position by a mask",
    explains=names("one_label class_collapse"),
)
INVERTED_MASK = Mistake(
    "inverted_mask",
    "error",
    meaning="The attention has weights for the padding alone, and none for the tokens before it.",
    advice="invert the mask: in MultiheadAttention key_padding_mask is True where a key is left out, and in "
    "scaled_dot_product_attention attn_mask is True where it takes part",
    explains=names("no_learning signal_lost ignores_input plateau padding_changes_output"),
)
ADDED_MASK = Mistake(
    "added_mask",
    "error",
    meaning="A mask of 0 and 1 is added to the scores of the attention, so that it hides no padding.",
    advice="convert the mask to torch.bool, in the sense of this function, or add 0 and minus infinity",
    explains=names("padding_changes_output"),
)
TIME_LEAK = Mistake(
    "time_leak",
    "error",
    meaning="The output at a position depends on later positions, which it should predict.",
    advice="use a causal mask and check which way round it is, shift the inputs, and look for a view or reshape that mixes positions",
)
RANDOM_OUTPUT = Mistake(
    "random_output",
    meaning="In evaluation mode the output changes from one forward pass to the next (relative change {figure:.1g}).",
    advice="use dropout and other random numbers only in training mode: pass training=self.training to functional.dropout, and "
    "dropout_p=0.0 to attention",
)

# -- gradients --------------------------------------------------------------------------------------------------------

NO_GRADIENT = Mistake(
    "no_gradient",
    "error",
    "warning",
    meaning="The weight is trainable, but no gradient ever reaches it.",
    advice="check that the loss uses the output of this module; search behind it for detach(), .data, torch.no_grad(), argmax, "
    "comparisons, new tensors, numpy, a backward that returns no gradient, or a reentrant checkpoint whose inputs need none",
    explains=names(
        "wrong_gradient signal_lost no_learning lr_too_low ignores_input never_moves plateau vanishing_gradient"
    ),
)
WRONG_GRADIENT = Mistake(
    "wrong_gradient",
    meaning="The loss depends on these parameters by a path that has no gradient.",
    advice="search behind this module for detach(), .data, torch.no_grad(), .item(), or a sample or rounding that passes no gradient, "
    "unless the gradient is stopped on purpose",
    explains=names("vanishing_gradient no_learning plateau"),
)
REVERSED_GRADIENT = Mistake(
    "reversed_gradient",
    meaning="The gradient of the parameters before this module is the negative of the derivative of the loss: a step raises the loss.",
    advice="check the sign in backward() of a torch.autograd.Function; put a reversal that is meant for another loss in front of that "
    "one alone",
    explains=names("diverges no_learning plateau lr_too_high loss_spike"),
)
EXPLODING_GRADIENT = Mistake(
    "exploding_gradient",
    "warning",
    "info",
    meaning="At the first step the gradient of this weight is {figure:.3g} times that of the last layers.",
    advice="use a smaller initialisation, a normalisation, or clip gradients",
    explains=names("nonfinite diverges loss_spike no_learning plateau"),
)
VANISHING_GRADIENT = Mistake(
    "vanishing_gradient",
    "warning",
    "info",
    meaning="The gradient of this weight is only {figure:.1g} of those of other layers.",
    advice="use rectifiers, residual connections, a normalisation or a larger initialisation",
    explains=names("ignores_input no_learning plateau class_collapse"),
)

# -- data and loss ----------------------------------------------------------------------------------------------------

INPUT_SCALE = Mistake(
    "input_scale",
    "warning",
    "info",
    meaning="Mean or standard deviation of the inputs is {figure:.3g}.",
    advice="normalise the inputs to mean 0 and standard deviation 1",
    explains=names(
        "signal_lost signal_scale loss_at_init lr_too_high dead_units no_learning ignores_input diverges exploding_gradient nonfinite "
        "saturated class_collapse loss_spike update_ratio plateau vanishing_gradient zero_gradient logit_growth"
    ),
)
TARGET_SCALE = Mistake(
    "target_scale",
    "info",
    meaning="Mean or standard deviation of the targets is {figure:.3g}.",
    advice="normalise the targets to mean 0 and standard deviation 1",
    explains=names("exploding_gradient unbounded_loss labels_out_of_reach"),
)
FIRST_STEP_RUNS = Mistake(
    "first_step_runs",
    "error",
    meaning="The first step does not run:",
    advice="run the model and the loss on this batch by hand",
)
LABEL_RANGE = Mistake(
    "label_range",
    "error",
    meaning="Labels are no indices of classes.",
    advice="change the number of outputs, or the labels",
)
LABEL_DTYPE = Mistake(
    "label_dtype", "error", meaning="The loss refuses the dtype of the labels.", advice="convert the labels"
)
LABEL_SHAPE = Mistake(
    "label_shape",
    "error",
    meaning="Output and labels have shapes that do not belong together.",
    advice="give both the shapes that the loss documents, for example with output.squeeze(-1) or labels.squeeze(-1)",
)
LOSS_AT_INIT = Mistake(
    "loss_at_init",
    "warning",
    "info",
    meaning="Before the first update the cross-entropy is {figure:.1f} times that of a guess.",
    advice="scale down the initial weights of the last layer, and of others that are far above one over the root of their number of "
    "inputs; check the normalisation of the inputs",
    explains=names(
        "logit_growth ignores_input lr_too_high exploding_gradient no_learning diverges dead_units loss_spike saturated"
    ),
)
LOSS_SCALE = Mistake(
    "loss_scale",
    "warning",
    "warning",
    meaning="The gradients are {figure:.0f} times those of the mean loss.",
    advice='use reduction="mean", or divide the loss by the number of labels',
    explains=names(
        "lr_too_high diverges nonfinite no_learning dead_units ignores_input lr_too_low loss_at_init class_collapse update_ratio "
        "plateau zero_gradient"
    ),
)
DIVIDED_TWICE = Mistake(
    "divided_twice",
    meaning="The loss is a mean, divided by the number of samples ({figure:.0f}) again: larger batches have smaller gradients.",
    advice='leave the division out, or use reduction="sum"',
    explains=names("lr_too_low no_learning plateau vanishing_gradient update_ratio"),
)
MIXED_REDUCTION = Mistake(
    "mixed_reduction",
    meaning="A part of the loss is a sum over the batch, and the rest is not.",
    advice="use one reduction for all terms of the loss",
)
LABELS_OF_OTHER_SAMPLES = Mistake(
    "labels_of_other_samples",
    "error",
    meaning="The loss compares {figure:.0%} of the outputs of a sample with labels of other samples.",
    advice="look for a reshape in place of a transpose, for the order of time and samples in outputs and labels, and for sorted or "
    "shuffled rows that are not put back",
    explains=names("batch_leak batch_position no_learning plateau"),
)
LABEL_IN_INPUTS = Mistake(
    "label_in_inputs",
    meaning="The labels are a linear function of column {figure:g} of the inputs.",
    advice="remove the column if it is not known when the model is used",
)
DUPLICATE_ROWS = Mistake(
    "duplicate_rows",
    meaning="{figure:.0%} of the samples have the inputs of another sample of the batch.",
    advice="check the sampler, the seeds of the workers, the index in the data set, and joins that have found no row",
)
SOFTMAX_TWICE = Mistake(
    "softmax_twice",
    "error",
    meaning="The outputs are probabilities, and the loss applies the softmax to them a second time.",
    advice="remove the softmax from the model, or use NLLLoss with log-probabilities",
    explains=names("no_learning ignores_input vanishing_gradient lr_too_low class_collapse plateau loss_floor"),
)
ACTIVATION_BEFORE_LOSS = Mistake(
    "activation_before_loss",
    meaning="The outputs have passed an activation function before the cross-entropy, which limits the scores of classes.",
    advice="remove the last activation function of the model",
    explains=names("no_learning plateau dead_units"),
)
NO_LOG_SOFTMAX = Mistake(
    "no_log_softmax",
    "error",
    meaning="The loss wants log-probabilities, but the outputs are not those.",
    advice="apply log_softmax to the outputs, or use CrossEntropyLoss",
    explains=names("no_learning diverges plateau"),
)
SIGMOID_TWICE = Mistake(
    "sigmoid_twice",
    "error",
    meaning="The outputs have passed a sigmoid, and the loss applies the sigmoid to them a second time.",
    advice="remove the sigmoid from the model, or use BCELoss",
    explains=names("no_learning ignores_input vanishing_gradient lr_too_low saturated plateau"),
)

UNBOUNDED_LOSS = Mistake(
    "unbounded_loss",
    meaning="The loss has no lower bound: it falls without end.",
    advice="check the sign of each term and the range of the labels",
    explains=names("diverges nonfinite loss_spike"),
    of_minimum=True,
)
WRONG_OPTIMUM = Mistake(
    "wrong_optimum",
    "error",
    meaning="The outputs of the least loss are not those of the labels.",
    advice="check the order of the axes, the order of the arguments, and the sign of the loss",
    explains=names("unbounded_loss no_learning diverges plateau class_collapse"),
    of_minimum=True,
)
LOSS_FLOOR = Mistake(
    "loss_floor",
    meaning="The loss cannot fall below {figure:.3g}, whatever the outputs are.",
    advice="look for a softmax or a sigmoid that the loss applies twice",
    explains=names("no_learning plateau lr_too_low"),
)
LABELS_WITHOUT_GRADIENT = Mistake(
    "labels_without_gradient",
    meaning="The loss ignores {figure:.0%} of the labels.",
    advice="check indices, ignore_index, class weights of 0 and masks",
    explains=names("class_collapse no_learning plateau"),
)
LABELS_OUT_OF_REACH = Mistake(
    "labels_out_of_reach",
    meaning="The last activation of the model cannot return {figure:.0%} of the labels.",
    advice="remove the last activation, or bring the labels into its range",
    explains=names("plateau"),
)
LABELS_NO_DISTRIBUTION = Mistake(
    "labels_no_distribution",
    meaning="The labels of a sample are no probabilities of the classes: their sum is not 1 (but {figure:.3g}).",
    advice="use BCEWithLogitsLoss for several labels, divide the labels of a sample by their sum, or apply a softmax to scores",
    explains=names("plateau unbounded_loss"),
)
LOSS_CONTRACT = Mistake(
    "loss_contract",
    "error",
    "warning",
    meaning="An argument of the loss is not what this loss needs.",
    advice="compare the arguments with the documentation of the loss",
    explains=names(
        "unbounded_loss wrong_optimum loss_floor labels_without_gradient labels_out_of_reach all_gradients_zero no_learning plateau "
        "diverges class_collapse target_scale"
    ),
)

_DECLARED = tuple(each for each in globals().values() if isinstance(each, Mistake))

EXPLAINS: Mapping[str, frozenset[str]] = {each.name: each.explains for each in _DECLARED}
"""Which mistakes each declared mistake explains."""

OF_MINIMA = frozenset(each.name for each in _DECLARED if each.of_minimum)
"""Which mistakes are none if an optimizer maximises the loss."""
