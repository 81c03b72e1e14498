"""Sample text for `distribution=bigram`, which follows the frequencies of English word pairs.

Abraham Lincoln's Gettysburg Address (1863) and the beginnings of the Declaration of Independence (1776) and of Herman
Melville's Moby-Dick (1851), all in the public domain.
"""

SAMPLE_TEXT = """
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and
dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether
that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that
war. We have come to dedicate a portion of that field, as a final resting place for those who here gave their lives
that that nation might live. It is altogether fitting and proper that we should do this. But, in a larger sense, we can
not dedicate, we can not consecrate, we can not hallow this ground. The brave men, living and dead, who struggled here,
have consecrated it, far above our poor power to add or detract. The world will little note, nor long remember what we
say here, but it can never forget what they did here. It is for us the living, rather, to be dedicated here to the
unfinished work which they who fought here have thus far so nobly advanced. It is rather for us to be here dedicated to
the great task remaining before us, that from these honored dead we take increased devotion to that cause for which
they gave the last full measure of devotion, that we here highly resolve that these dead shall not have died in vain,
that this nation, under God, shall have a new birth of freedom, and that government of the people, by the people, for
the people, shall not perish from the earth.

When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have
connected them with another, and to assume among the powers of the earth, the separate and equal station to which the
Laws of Nature and of Nature's God entitle them, a decent respect to the opinions of mankind requires that they should
declare the causes which impel them to the separation. We hold these truths to be self-evident, that all men are
created equal, that they are endowed by their Creator with certain unalienable Rights, that among these are Life,
Liberty and the pursuit of Happiness. That to secure these rights, Governments are instituted among Men, deriving their
just powers from the consent of the governed, That whenever any Form of Government becomes destructive of these ends,
it is the Right of the People to alter or to abolish it, and to institute new Government, laying its foundation on such
principles and organizing its powers in such form, as to them shall seem most likely to effect their Safety and
Happiness.

Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is a
way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the
mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin
warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper hand
of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and
methodically knocking people's hats off, then, I account it high time to get to sea as soon as I can. This is my
substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to the
ship. There is nothing surprising in this. If they but knew it, almost all men in their degree, some time or other,
cherish very nearly the same feelings towards the ocean with me.
"""
