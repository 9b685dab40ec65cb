#pragma once

#include <reprise/recompute/chain.h>

namespace reprise {

/// Runs every stage of `chain` once on `inputs`, which are those of a training
/// step, and throws c10::Error if the chain cannot be trained:
///
/// - a stage takes another number of tensors than the stage before it returns;
/// - a stage returns no tensor, or undefined ones only;
/// - a stage modifies its inputs in place;
/// - a stage uses a tensor that requires a gradient and is neither an input nor
///   a parameter of its modules. Such a parameter gets a gradient, but the
///   costs of the stage and the order of gradients do not include it;
/// - inputs of a stage require a gradient, but none of its outputs does, so
///   that the stages before it are not trained.
///
/// The text names the stages and says what to change. Nothing is saved for a
/// backward pass, so that this needs the memory of an evaluation. Buffers and
/// random generators are restored afterwards, and gradients are not changed.
/// Expects grad mode to be on and at least one input (c10::Error). verify()
/// calls this function.
void check_chain(const Chain& chain, const Tensors& inputs);

/// Runs `chain`, whose first output is the sum of the losses, on `inputs`, and
/// throws c10::Error if the output is not one floating-point value, requires no
/// gradient, or is the mean of the losses.
///
/// A mean is found by a second run on all samples twice, `inputs` repeated along
/// their first dimension: a sum doubles, and a mean stays the same. BatchNorm has
/// the same statistics in both runs. With random numbers, such as dropout, the
/// results differ a little, so anything within 5 % of the first result is a
/// mean. If the inputs do not have the same first dimension, or the loss is 0,
/// this is not tested. Needs the memory of an evaluation with twice the samples;
/// restores buffers and random generators.
void check_loss(const Chain& chain, const Tensors& inputs);

}  // namespace reprise
