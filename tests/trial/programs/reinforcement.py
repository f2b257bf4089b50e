"""Reinforcement learning: one state decides which action is right, so that a minute is not needed."""

import copy

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from tests.trial.program import LABELS, Training, mlp, program


def reward_of(states, actions):
    """Return 1 where the action is the sign of the first number of the state."""
    return ((states[:, 0] > 0) == (actions > 0)).float()


def follow(target, model, share=0.05):
    with torch.no_grad():
        for mean, parameter in zip(target.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, share)


@program(told=LABELS)
def reinforce():
    """REINFORCE with a running baseline."""
    model, baseline = mlp(4, 32, 2), [0.0]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def step():
        states = torch.randn(32, 4)
        policy = Categorical(logits=model(states))
        actions = policy.sample()
        rewards = reward_of(states, actions)
        baseline[0] += 0.1 * (rewards.mean().item() - baseline[0])
        optimizer.zero_grad()
        loss = -(policy.log_prob(actions) * (rewards - baseline[0])).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(4, 64), nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.actor(hidden), self.critic(hidden)[:, 0]


@program()
def actor_critic():
    """pytorch/examples' actor-critic, at its large rate."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)

    def step():
        states = torch.randn(30, 4)
        logits, values = model(states)
        policy = Categorical(logits=logits)
        actions = policy.sample()
        returns = reward_of(states, actions).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        advantages = returns - values.detach()
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(values, returns, reduction="sum") - (policy.log_prob(actions) * advantages).sum()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)


@program(4, 20)
def ppo():
    """PPO: four epochs over a rollout, with an entropy term and clipped gradients."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def step():
        with torch.no_grad():
            states = torch.randn(64, 4)
            logits, values = model(states)
            actions = Categorical(logits=logits).sample()
            old = Categorical(logits=logits).log_prob(actions)
            returns = reward_of(states, actions)
            advantages = returns - values
        losses = []
        for _ in range(4):
            logits, values = model(states)
            policy = Categorical(logits=logits)
            ratio = (policy.log_prob(actions) - old).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
            loss = -gain + 0.5 * F.mse_loss(values, returns) - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss)
        return losses

    return Training(model, step)


class Online(nn.Module):
    """A network and its slow copy."""

    def __init__(self, online):
        super().__init__()
        self.online, self.target = online, copy.deepcopy(online)

    def forward(self, x):
        return self.online(x)


def q_learning(model, frozen, copied=None):
    if frozen:
        model.target.requires_grad_(False)
    optimizer, drawn = torch.optim.Adam(model.online.parameters(), 3e-3), iter(range(10**9))

    def step():
        states = torch.randn(32, 4)
        actions = torch.randint(0, 2, (32,))
        with torch.no_grad():
            wanted = reward_of(states, actions) + 0.5 * model.target(torch.randn(32, 4)).max(1).values
        chosen = model(states).gather(1, actions[:, None])[:, 0]
        optimizer.zero_grad()
        loss = F.smooth_l1_loss(chosen, wanted)
        loss.backward()
        optimizer.step()
        if copied is None:
            follow(model.target, model.online)
        elif next(drawn) % copied == 0:
            model.target.load_state_dict(model.online.state_dict())
        return loss

    return Training(model, step)


@program(layers=False)  # the target is called, too
def dqn_with_a_copied_target():
    """DQN whose target is copied every tenth step."""
    return q_learning(Online(mlp(4, 32, 2)), True, 10)


@program(layers=False, judged={"no_gradient": "true: the target still requires gradients, and gets none"})
def dqn_with_an_averaged_target():
    """DQN whose target follows by Polyak averaging, and still requires gradients."""
    return q_learning(Online(mlp(4, 32, 2)), False)


class ActorAndCritics(nn.Module):
    def __init__(self, critics):
        super().__init__()
        self.actor = mlp(4, 32, 2)
        self.critics = nn.ModuleList(mlp(5, 32, 1) for _ in range(critics))
        self.slow_actor, self.slow_critics = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.slow_actor.requires_grad_(False)
        self.slow_critics.requires_grad_(False)

    def values(self, critics, states, actions):
        together = torch.cat([states, actions], 1)
        return torch.stack([critic(together)[:, 0] for critic in critics]).amin(0)


def continuous(model, *, every=1, noise=0.0):
    """Return the step of DDPG, or of TD3 if the actor steps more rarely and its target is noisy."""
    of_actor = torch.optim.Adam(model.actor.parameters(), 1e-3)
    of_critics = torch.optim.Adam(model.critics.parameters(), 3e-3)

    def step():
        losses = []
        for number in range(every):
            states = torch.randn(32, 4)
            actions = 2 * torch.rand(32, 1) - 1
            with torch.no_grad():
                later = torch.randn(32, 4)
                proposed = (model.slow_actor(later)[:, :1].tanh() + noise * torch.randn(32, 1)).clamp(-1, 1)
                wanted = -(actions - states[:, :1].tanh())[:, 0].square()
                wanted = wanted + 0.5 * model.values(model.slow_critics, later, proposed)
            together = torch.cat([states, actions], 1)
            loss = sum(F.mse_loss(critic(together)[:, 0], wanted) for critic in model.critics)
            of_critics.zero_grad()
            loss.backward()
            of_critics.step()
            losses.append(loss)
            if number == every - 1:
                of_actor.zero_grad()
                proposed = model.actor(states)[:, :1].tanh()
                loss = -model.critics[0](torch.cat([states, proposed], 1)).mean()
                loss.backward()
                of_actor.step()
                losses.append(loss)
                follow(model.slow_actor, model.actor)
                follow(model.slow_critics, model.critics)
        return losses

    return step


@program(2, layers=False, unseen=[0], told=LABELS)
def ddpg():
    """DDPG with both networks and their targets in one module."""
    model = ActorAndCritics(1)
    return Training(model, continuous(model))


@program(3, 40, layers=False, unseen=[0, 1])
def td3():
    """TD3: two critics, an actor that steps half as often."""
    model = ActorAndCritics(2)
    return Training(model, continuous(model, every=2, noise=0.2))


# the loss of the temperature contains no output of the model
@program(3, 40, layers=False, unseen=[0, *range(2, 120, 3)], told=LABELS)
def soft_actor_critic():
    """SAC with a learned temperature: three optimizers."""
    model = ActorAndCritics(2)
    model.log_temperature = nn.Parameter(torch.tensor(-2.0))
    of_actor = torch.optim.Adam(model.actor.parameters(), 1e-3)
    of_critics = torch.optim.Adam(model.critics.parameters(), 3e-3)
    of_temperature = torch.optim.Adam([model.log_temperature], 1e-3)

    def act(states):
        mean, spread = model.actor(states).chunk(2, 1)
        policy = Normal(mean, spread.clamp(-3, 1).exp())
        raw = policy.rsample()
        actions = raw.tanh()
        return actions, (policy.log_prob(raw) - (1 - actions.square() + 1e-6).log())[:, 0]

    def step():
        states = torch.randn(32, 4)
        temperature = model.log_temperature.exp().detach()
        with torch.no_grad():
            actions, _ = act(states)
            later = torch.randn(32, 4)
            proposed, log_probability = act(later)
            wanted = -(actions - states[:, :1].tanh())[:, 0].square()
            slow = model.values(model.slow_critics, later, proposed) - temperature * log_probability
            wanted = wanted + 0.5 * slow
        together = torch.cat([states, actions], 1)
        of_values = sum(F.mse_loss(critic(together)[:, 0], wanted) for critic in model.critics)
        of_critics.zero_grad()
        of_values.backward()
        of_critics.step()
        proposed, log_probability = act(states)
        of_policy = (temperature * log_probability - model.values(model.critics, states, proposed)).mean()
        of_actor.zero_grad()
        of_policy.backward()
        of_actor.step()
        _, log_probability = act(states)
        of_entropy = -(model.log_temperature * (log_probability - 1).detach()).mean()
        of_temperature.zero_grad()
        of_entropy.backward()
        of_temperature.step()
        follow(model.slow_critics, model.critics)
        return of_values, of_policy, of_entropy

    return Training(model, step)


@program(told=LABELS)
def direct_preference():
    """DPO: pairs of answers against a frozen copy."""
    model = mlp(4, 32, 8)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def step():
        x = torch.randn(32, 4)
        better = (x[:, 0] > 0).long()
        pairs = torch.stack([better, 7 - better], 1)
        ratios = (model(x).log_softmax(1) - reference(x).log_softmax(1)).gather(1, pairs)
        optimizer.zero_grad()
        loss = -F.logsigmoid(0.5 * (ratios[:, 0] - ratios[:, 1])).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, step)
