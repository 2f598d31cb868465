from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('echomq', '0003_jobs'),
    ]

    operations = [
        migrations.AddField(
            model_name='outbox',
            name='keys',
            field=models.TextField(null=True),
        ),
    ]
