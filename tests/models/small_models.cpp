#include "small_models.h"

#include "support.h"

namespace reprise::testing {

const std::vector<SmallModel>& small_models() {
  static const std::vector<SmallModel> all = [] {
    ModelOptions mlp;
    mlp.depth = 3;
    mlp.width = 16;
    mlp.image_size = 8;
    mlp.dropout = 0.2;
    ModelOptions cnn_basic;
    cnn_basic.image_size = 28;
    cnn_basic.norm = "group";
    ModelOptions cnn_blocks;
    cnn_blocks.depth = 3;
    cnn_blocks.width = 4;
    cnn_blocks.image_size = 20;
    ModelOptions cnn_profile;
    cnn_profile.image_size = 8;
    ModelOptions vgg;
    vgg.width = 2;
    vgg.image_size = 32;
    vgg.classes = 5;
    ModelOptions resnet = vgg;
    resnet.width = 4;
    resnet.image_size = 40;
    ModelOptions unet;
    unet.depth = 2;
    unet.width = 4;
    unet.image_size = 16;
    ModelOptions transformer;
    transformer.depth = 2;
    transformer.width = 16;
    transformer.heads = 2;
    ModelOptions vit = transformer;
    vit.image_size = 32;
    vit.channels = 1;
    vit.classes = 4;
    vit.dropout = 0.1;
    ModelOptions language = transformer;
    language.vocab = 11;
    language.seq = 8;
    ModelOptions llama = language;
    llama.width = 24;
    llama.heads = 6;
    llama.kv_heads = 2;
    llama.mlp_width = 13;
    return std::vector<SmallModel>{
        {"mlp", mlp},
        {"cnn-basic", cnn_basic},
        {"cnn-blocks", cnn_blocks},
        {"cnn-profile", cnn_profile},
        {"vgg16", vgg},
        {"resnet18", resnet},
        {"resnet50", resnet},
        {"resnet101", resnet},
        {"unet", unet},
        {"bert-base", language},
        {"bert-large", language},
        {"gpt2", language},
        {"gpt2-medium", language},
        {"gpt2-large", language},
        {"gpt2-xl", language},
        {"llama-small", llama},
        {"llama-2-7b", llama},
        {"llama-3.2-1b", llama},
        {"llama-3.2-3b", llama},
        {"llama-3-8b", llama},
        {"qwen2.5-0.5b", llama},
        {"qwen2.5-1.5b", llama},
        {"qwen2.5-7b", llama},
        {"vit-b-16", vit},
        {"vit-l-16", vit},
    };
  }();
  return all;
}

Tensors small_inputs(const Model& model) {
  return random_batch(model.task, model.options, 3, device());
}

}  // namespace reprise::testing
