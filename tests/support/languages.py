"""A small text in eleven languages and more, and tokenizers of two kinds trained on it.

The languages are XQuAD's, on which the paper measures translation across tokenizers.
"""

import json
from collections import Counter

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LANGUAGES = {
    "en": (
        "The ferry leaves the harbour at six in the morning. On Tuesdays it carries the baker, "
        "who sells her bread on the island, and three children who go to school there. When the "
        "wind comes from the north, nobody crosses: the baker reads a book, and the children "
        "learn at home."
    ),
    "es": (
        "El barco sale del puerto a las seis de la mañana. Los martes lleva a la panadera, que "
        "vende su pan en la isla, y a tres niños que van allí a la escuela. Cuando el viento "
        "viene del norte, nadie cruza: ¿qué hace entonces la panadera? Lee un libro, y los niños "
        "aprenden en casa."
    ),
    "de": (
        "Die Fähre verlässt den Hafen um sechs Uhr morgens. Dienstags fährt die Bäckerin mit, "
        "die ihr Brot auf der Insel verkauft, und drei Kinder, die dort zur Schule gehen. Kommt "
        "der Wind von Norden, setzt niemand über: Die Bäckerin liest ein Buch, und die Kinder "
        "lernen zu Hause."
    ),
    "el": (
        "Το πλοίο φεύγει από το λιμάνι στις έξι το πρωί. Κάθε Τρίτη παίρνει τη φουρνάρισσα, που "
        "πουλάει το ψωμί της στο νησί, και τρία παιδιά που πηγαίνουν εκεί στο σχολείο. Όταν "
        "φυσάει βοριάς, κανείς δεν περνάει: η φουρνάρισσα διαβάζει ένα βιβλίο και τα παιδιά "
        "μένουν στο σπίτι."
    ),
    "ru": (
        "Паром выходит из гавани в шесть часов утра. По вторникам на нём едет булочница, которая "
        "продаёт свой хлеб на острове, и трое детей, которые ходят там в школу. Когда дует "
        "северный ветер, никто не переправляется: булочница читает книгу, а дети учатся дома."
    ),
    "tr": (
        "Vapur limandan sabah altıda kalkar. Salı günleri ekmeğini adada satan fırıncıyı ve "
        "orada okula giden üç çocuğu taşır. Rüzgâr kuzeyden estiğinde kimse karşıya geçmez: "
        "fırıncı kitap okur, çocuklar da evde ders çalışır."
    ),
    "ar": (
        "تغادر العبّارة الميناء في الساعة السادسة صباحًا. وفي أيام الثلاثاء تحمل الخبّازة التي "
        "تبيع خبزها في الجزيرة، وثلاثة أطفال يذهبون إلى المدرسة هناك. وعندما تهبّ الريح من "
        "الشمال لا يعبر أحد: تقرأ الخبّازة كتابًا، ويتعلّم الأطفال في البيت."
    ),
    "vi": (
        "Chuyến phà rời bến cảng lúc sáu giờ sáng. Vào thứ ba, phà chở người làm bánh, bà bán "
        "bánh mì trên đảo, và ba đứa trẻ đi học ở đó. Khi gió thổi từ phía bắc, không ai qua "
        "sông: bà đọc sách, còn bọn trẻ học ở nhà."
    ),
    "th": (
        "เรือข้ามฟากออกจากท่าเรือตอนหกโมงเช้า ทุกวันอังคารเรือพาคนทำขนมปังซึ่งขายขนมปังบนเกาะ "
        "และเด็กสามคนที่ไปโรงเรียนที่นั่น เมื่อลมพัดมาจากทิศเหนือก็ไม่มีใครข้าม "
        "คนทำขนมปังอ่านหนังสือ และเด็กๆ เรียนที่บ้าน"
    ),
    "zh": (
        "渡船早上六点离开港口。每逢星期二，船上有一位面包师，她在岛上卖面包，还有三个孩子去岛上的"
        "学校上学。刮北风的时候，谁也不过海：面包师看书，孩子们在家里学习。"
    ),
    "hi": (
        "नाव सुबह छह बजे बंदरगाह से निकलती है। मंगलवार को उसमें नानबाई जाती है, जो द्वीप पर अपनी "
        "रोटी बेचती है, और तीन बच्चे जो वहाँ स्कूल जाते हैं। जब हवा उत्तर से आती है तो कोई पार "
        "नहीं जाता: नानबाई किताब पढ़ती है और बच्चे घर पर पढ़ते हैं।"
    ),
}
OTHERS = {
    "he": (
        "המעבורת יוצאת מהנמל בשש בבוקר. בימי שלישי נוסעת בה האופה, ושלושה ילדים שהולכים לבית הספר."
    ),
    "ja": (
        "フェリーは朝六時に港を出ます。火曜日には、島でパンを売るパン屋さんと、三人の子どもが乗り"
        "ます。"
    ),
    "ko": (
        "배는 아침 여섯 시에 항구를 떠납니다. 화요일에는 섬에서 빵을 파는 제빵사와 아이 세 명이 "
        "탑니다."
    ),
    "code": "def ferry(day: str, wind: str = 'south') -> list[str]:\n"
    '    """Who crosses, if anybody does."""\n'
    "    if wind == 'north':\n        return []\n\n"
    "    return ['baker'] + 3 * ['child'] if day == 'Tue' else []\n\t# x1 += 0x7F; y <<= 2\n",
    "symbols": "👩‍👩‍👧 crossed 🏴󠁧󠁢󠁳󠁣󠁴󠁿 on a ⛴️, 1️⃣ by 1️⃣! cafe\u0301 e\u0323\u0302 \u212b ﬁne ½ … "
    "\u202eright to left\u202c\u00a0\u200b\r\n\t  \n  end ",
}
TEXTS = {**LANGUAGES, **OTHERS}
CORPUS = [*TEXTS.values(), *(sentence for text in TEXTS.values() for sentence in text.split(". "))]
VOCABULARY = 1500

# Qwen's rule: at most one character before letters, digits alone, spaces before words.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    *, normaliser: normalizers.Normalizer | None = None, prefix: bool = False, trim: bool = False
) -> Tokenizer:
    """Byte-level BPE as Qwen has it; with ``prefix`` and ``trim`` as GPT-2 and RoBERTa may."""
    tokenizer = Tokenizer(models.BPE())
    if normaliser is not None:
        tokenizer.normalizer = normaliser
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=prefix)
    tokenizer.pre_tokenizer = spell if prefix else pre_tokenizers.Sequence([words, spell])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def sentencepiece(*, unigram: bool = False, legacy: bool = True) -> Tokenizer:
    """BPE, or unigram, over leading-space marks with byte fallback, as Mistral and Llama 2 have it.

    ``legacy`` puts the mark in front by a normaliser, else the pre-tokenizer does. The rarer
    characters are left to bytes.
    """
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    # The library would choose among equally frequent characters at random.
    common = [c for c, _ in Counter(sorted("".join(CORPUS).replace(" ", "▁"))).most_common(300)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=common,
        limit_alphabet=len(common), show_progress=False,
    )  # fmt: skip
    if unigram:
        model = models.Unigram(byte_fallback=True)
        trainer = trainers.UnigramTrainer(
            vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    tokenizer = Tokenizer(model)
    if legacy:
        mark = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(mark)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    by_words = pre_tokenizers.Metaspace(prepend_scheme="always")  # else BPE would learn sentences
    learner = Tokenizer.from_str(tokenizer.to_str())
    learner.model, learner.pre_tokenizer = model, by_words
    learner.normalizer = normalizers.Sequence([])
    learner.train_from_iterator(CORPUS, trainer)
    facts, learned = json.loads(tokenizer.to_str()), json.loads(learner.to_str())
    facts["model"] = learned["model"]
    facts["added_tokens"] = learned["added_tokens"][:3]  # a byte is no token that text can spell
    tokenizer = Tokenizer.from_str(json.dumps(facts))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["[INST]", "[/INST]"])
    return tokenizer
